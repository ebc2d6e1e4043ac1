-- One row per conversation, found by the digest of its owner and name, since these may be of any length.
-- A fork has its parent's entries before fork_at. An erased conversation whose entries forks still share
-- stays as a row without a name, and goes with the last of them.
CREATE TABLE refold_conversation (
    cid bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    family bigint NOT NULL,   -- the cid of the first ancestor: who shares entries shares this
    key bytea UNIQUE,
    owner_key bytea NOT NULL,   -- digest of the owner
    owner bytea NOT NULL,
    name bytea,
    created double precision NOT NULL,
    parent bigint REFERENCES refold_conversation (cid),
    fork_at bigint NOT NULL,
    base bytea NOT NULL,   -- digest of the entry before the first own one
    seal bytea NOT NULL   -- digest of this row
);
CREATE INDEX refold_owned ON refold_conversation (owner_key, cid);
CREATE INDEX refold_fork ON refold_conversation (parent) WHERE parent IS NOT NULL;
CREATE INDEX refold_forked ON refold_conversation (owner_key) WHERE parent IS NOT NULL;

-- The streams. Nothing refers to them by a foreign key, so that they can be partitioned by cid.
CREATE TABLE refold_entry (
    cid bigint NOT NULL,
    at bigint NOT NULL,
    kind bytea NOT NULL,
    id bytea,
    head bytea NOT NULL,
    body bytea NOT NULL,   -- JSON, or zlib where it begins with an x
    digest bytea NOT NULL,
    PRIMARY KEY (cid, at)
);
ALTER TABLE refold_entry ALTER COLUMN body SET STORAGE EXTERNAL;
CREATE INDEX refold_entry_fact ON refold_entry (cid, at) WHERE kind <> 'said'::bytea;
CREATE INDEX refold_entry_id ON refold_entry (cid, sha256(id)) WHERE id IS NOT NULL;

-- Names may be of any length, and those of an index may not: an index has their digests.
CREATE TABLE refold_snapshot (
    cid bigint NOT NULL,
    view bytea NOT NULL,
    at bigint NOT NULL,
    body bytea NOT NULL,
    digest bytea NOT NULL
);
ALTER TABLE refold_snapshot ALTER COLUMN body SET STORAGE EXTERNAL;
CREATE UNIQUE INDEX refold_snapshot_key ON refold_snapshot (cid, sha256(view));

CREATE TABLE refold_lease (
    cid bigint NOT NULL,
    name bytea NOT NULL,
    holder bytea NOT NULL,
    fence bigint NOT NULL,
    until double precision NOT NULL
);
CREATE UNIQUE INDEX refold_lease_key ON refold_lease (cid, sha256(name));

-- Small things that outlive conversations, by name.
CREATE TABLE refold_note (name bytea NOT NULL, body bytea NOT NULL);
CREATE UNIQUE INDEX refold_note_key ON refold_note (sha256(name));

-- What models wrote and somebody paid for, by a digest of what they were asked.
CREATE TABLE refold_summary (
    made bigint GENERATED ALWAYS AS IDENTITY,   -- grows, so that the first to go is the oldest
    cid bigint NOT NULL,
    digest bytea NOT NULL,
    body bytea NOT NULL   -- packed as an entry's
);
CREATE UNIQUE INDEX refold_summary_key ON refold_summary (sha256(digest), cid);
CREATE INDEX refold_summary_cid ON refold_summary (cid, made);

-- When the results of a tool expire, by agent; the agent '' is every agent. NULL is as configured elsewhere.
CREATE TABLE refold_setting (
    agent bytea NOT NULL,
    tool bytea NOT NULL CHECK (tool <> ''),
    after_steps bigint CHECK (after_steps BETWEEN 0 AND 1000000000),
    mode text CHECK (mode IN ('none', 'remove', 'compact')),
    compact_mode text CHECK (compact_mode IN ('first-n-chars', 'ai-summary', 'skeleton')),
    length bigint CHECK (length BETWEEN 0 AND 1000000000),
    prompt bytea,
    strategy text CHECK (strategy IN ('age', 'relevance')),
    threshold double precision CHECK (threshold BETWEEN 0 AND 1)
);
CREATE UNIQUE INDEX refold_setting_key ON refold_setting (sha256(agent), sha256(tool));

-- How far somebody has followed a conversation, which may not have begun.
CREATE TABLE refold_cursor (
    key bytea NOT NULL,
    owner bytea NOT NULL,
    name bytea NOT NULL,
    what bytea NOT NULL,
    next bigint NOT NULL
);
CREATE UNIQUE INDEX refold_cursor_key ON refold_cursor (sha256(what), key);
CREATE INDEX refold_cursor_of ON refold_cursor (key);

-- The digest of a conversation's row.
CREATE FUNCTION refold_seal(c refold_conversation) RETURNS bytea LANGUAGE sql IMMUTABLE AS $$
    SELECT sha256(convert_to(concat_ws('/', c.cid, encode(c.owner, 'hex'), coalesce(encode(c.name, 'hex'), '-'),
        encode(float8send(c.created), 'hex'), coalesce(c.parent, 0), c.fork_at, encode(c.base, 'hex')), 'UTF8'))
$$;

-- The conversation of a key, which nobody else changes until the transaction ends: whoever writes to one
-- holds it. The lock is not a row's, so that it costs no write.
CREATE FUNCTION refold_hold(of bytea) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended(encode(of, 'hex'), 0));
    RETURN (SELECT c.cid FROM refold_conversation c WHERE c.key = of);
END $$;

-- Which conversation has which of the places, from the newest to the oldest.
CREATE FUNCTION refold_parts(of bytea) RETURNS TABLE (cid bigint, low bigint, high bigint)
LANGUAGE plpgsql STABLE ROWS 1 AS $$
DECLARE
    above bigint;
BEGIN
    SELECT c.cid, c.parent, c.fork_at, 1::bigint << 32 INTO cid, above, low, high
    FROM refold_conversation c WHERE c.key = of;
    WHILE cid IS NOT NULL LOOP
        RETURN NEXT;
        high := least(low, high);
        SELECT c.cid, c.parent, c.fork_at INTO cid, above, low FROM refold_conversation c WHERE c.cid = above;
    END LOOP;
END $$;

-- The entries from `start` up to `stop`, in order, without those of the kind `but`: the first `rows` of them,
-- or fewer, where those before the last of them have less than `bytes`.
CREATE FUNCTION refold_read(of bytea, start bigint, stop bigint, but bytea, rows integer, bytes bigint)
RETURNS TABLE (at bigint, kind bytea, id bytea, head bytea, body bytea, digest bytea)
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
BEGIN
    IF but = 'said' THEN  -- there is an index for what is left
        RETURN QUERY SELECT f.at, f.kind, f.id, f.head, f.body, f.digest FROM (
            SELECT e.*, row_number() OVER place AS n, sum(octet_length(e.body)) OVER place AS size
            FROM refold_parts(of) p CROSS JOIN LATERAL (
                SELECT * FROM refold_entry r WHERE r.cid = p.cid AND r.at >= greatest(p.low, start)
                AND r.at < least(p.high, stop) AND r.kind <> 'said'::bytea ORDER BY r.at LIMIT rows
            ) e WINDOW place AS (ORDER BY e.at)
        ) f WHERE f.n <= rows AND f.size - octet_length(f.body) < bytes ORDER BY f.at;
    ELSE
        RETURN QUERY SELECT f.at, f.kind, f.id, f.head, f.body, f.digest FROM (
            SELECT e.*, row_number() OVER place AS n, sum(octet_length(e.body)) OVER place AS size
            FROM refold_parts(of) p CROSS JOIN LATERAL (
                SELECT * FROM refold_entry r WHERE r.cid = p.cid AND r.at >= greatest(p.low, start)
                AND r.at < least(p.high, stop) AND (but IS NULL OR r.kind <> but) ORDER BY r.at LIMIT rows
            ) e WINDOW place AS (ORDER BY e.at)
        ) f WHERE f.n <= rows AND f.size - octet_length(f.body) < bytes ORDER BY f.at;
    END IF;
END $$;

-- Compare-and-append: all of the entries if the record's next place, last digest and lease are as expected,
-- and else what they are. Tried `again` after a connection broke, it finds what it has stored before.
CREATE FUNCTION refold_append(
    of bytea, owner_key bytea, owner bytea, name bytea, now double precision, again boolean,
    first bigint, after bytea, lease bytea, holder bytea, fence bigint,
    kinds bytea[], ids bytea[], heads bytea[], bodies bytea[], digests bytea[],
    OUT stored boolean, OUT next bigint, OUT last bytea,
    OUT held_by bytea, OUT held_fence bigint, OUT held_until double precision
) LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    here bigint;
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
        SELECT l.holder, l.fence, l.until INTO held_by, held_fence, held_until
        FROM refold_lease l WHERE l.cid = here AND sha256(l.name) = sha256(lease);
        stored := stored AND coalesce(held_by = holder AND held_fence = fence AND held_until <> 0, false);
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

-- A new conversation, sealed.
CREATE FUNCTION refold_add(
    of bytea, owner_key bytea, owner bytea, name bytea, now double precision,
    family bigint, parent bigint, fork_at bigint, base bytea
) RETURNS bigint LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    c refold_conversation;
BEGIN
    c.cid := nextval(pg_get_serial_sequence('refold_conversation', 'cid'));
    c := (c.cid, coalesce(family, c.cid), of, owner_key, owner, name, now, parent, fork_at, base, ''::bytea);
    c.seal := refold_seal(c);
    INSERT INTO refold_conversation OVERRIDING SYSTEM VALUE SELECT c.*;
    RETURN c.cid;
END $$;
