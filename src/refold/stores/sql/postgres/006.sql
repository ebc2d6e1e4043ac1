-- Small values by name: of a conversation (its key) or of the whole store (no scope). They replace a table each for
-- notes, cursors, summaries, leases and snapshots; the last two begin empty.
CREATE TABLE refold_shelf (scope bytea NOT NULL, name bytea NOT NULL, value bytea NOT NULL);
ALTER TABLE refold_shelf ALTER COLUMN value SET STORAGE EXTERNAL;
CREATE UNIQUE INDEX refold_shelf_key ON refold_shelf (scope, sha256(name));
CREATE INDEX refold_shelf_name ON refold_shelf (sha256(name), scope);

INSERT INTO refold_shelf SELECT '', name, body FROM refold_note;
INSERT INTO refold_shelf SELECT key, 'c:'::bytea || what, convert_to(next::text, 'UTF8') FROM refold_cursor;
INSERT INTO refold_shelf SELECT c.key, convert_to('~' || encode(s.digest, 'hex'), 'UTF8'), s.body
FROM refold_summary s JOIN refold_conversation c ON c.cid = s.cid WHERE c.key IS NOT NULL;

DROP TABLE refold_note, refold_cursor, refold_summary, refold_lease, refold_snapshot;
DROP FUNCTION refold_append;

-- Compare-and-append: all of the entries if the record's next place, last digest and lease are as expected,
-- and else what they are. Tried `again` after a connection broke, it finds what it has stored before.
CREATE FUNCTION refold_append(
    of bytea, owner_key bytea, owner bytea, name bytea, now double precision, again boolean,
    first bigint, after bytea, lease bytea, holder bytea, fence bigint,
    kinds bytea[], ids bytea[], heads bytea[], bodies bytea[], digests bytea[],
    OUT stored boolean, OUT next bigint, OUT last bytea, OUT held bytea
) LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    here bigint;
    parts text[];
    count integer := cardinality(digests);
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended(encode(of, 'hex'), 0));
    SELECT c.cid, coalesce(e.at + 1, c.fork_at), coalesce(e.digest, c.base) INTO here, next, last
    FROM refold_conversation c LEFT JOIN LATERAL (
        SELECT t.at, t.digest FROM refold_entry t WHERE t.cid = c.cid ORDER BY t.at DESC LIMIT 1
    ) e ON true WHERE c.key = of;
    IF here IS NULL THEN
        next := 0;
        last := decode(repeat('00', 16), 'hex');
    END IF;
    stored := next = first AND last = after;
    IF lease IS NOT NULL THEN
        held := (SELECT s.value FROM refold_shelf s WHERE s.scope = of AND sha256(s.name) = sha256(lease));
        parts := regexp_match(encode(held, 'escape'), '^(\S+) (\S+) (.*)$');  -- fence, until, holder
        stored := stored AND coalesce(
            parts[1] = fence::text AND parts[2]::double precision <> 0 AND parts[3] = encode(holder, 'escape'), false
        );
    END IF;
    IF stored THEN
        IF here IS NULL AND count > 0 THEN
            here := refold_add(of, owner_key, owner, name, now, NULL, NULL, 0, last);
        END IF;
        INSERT INTO refold_entry (cid, at, kind, id, head, body, digest)
        SELECT here, first + e.n - 1, e.kind, e.id, e.head, e.body, e.digest
        FROM unnest(kinds, ids, heads, bodies, digests) WITH ORDINALITY e (kind, id, head, body, digest, n);
    ELSIF again THEN
        stored := EXISTS (
            SELECT 1 FROM refold_entry e
            WHERE e.cid = here AND e.at = first + count - 1 AND e.digest = digests[count]
        );
    END IF;
END $$;
