-- What can be found: the terms of an entry, without their order, for the index to narrow a search; and the
-- words themselves, which decide. Terms that no text has stand for tools, role, owner and conversation.
CREATE TABLE refold_words (
    cid bigint NOT NULL,
    at bigint NOT NULL,
    terms tsvector NOT NULL,
    words text NOT NULL,   -- text and parts, each within spaces, a line each
    tools bytea[] NOT NULL,
    role bytea NOT NULL,
    PRIMARY KEY (cid, at)
);
CREATE INDEX refold_words_terms ON refold_words USING gin (terms);

-- What entries mean: some vectors of float32 for each, by the digest of the embedder's name.
CREATE TABLE refold_vector (
    cid bigint NOT NULL,
    at bigint NOT NULL,
    what bytea NOT NULL,
    n integer NOT NULL,
    vector bytea NOT NULL,
    PRIMARY KEY (cid, what, at, n)
);

-- How far each of these has followed a conversation.
CREATE TABLE refold_followed (
    cid bigint NOT NULL,
    what bytea NOT NULL,   -- '' for words, else the digest of the embedder's name
    next bigint NOT NULL,   -- the first place that is not in it
    PRIMARY KEY (cid, what)
);

-- All that is wanted stands in the words: a line each, and of the forms in a line, a tab between them, any one.
CREATE FUNCTION refold_has(words text, wanted text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    forms text;
BEGIN
    FOREACH forms IN ARRAY string_to_array(wanted, E'\n') LOOP
        IF NOT EXISTS (SELECT 1 FROM unnest(string_to_array(forms, E'\t')) f WHERE strpos(words, f) > 0) THEN
            RETURN false;
        END IF;
    END LOOP;
    RETURN true;
END $$;

-- All parts of a conversation. Of an owner, where no conversation is given, only what forks share with
-- conversations that are erased, or somebody else's; in one fork that has it.
CREATE FUNCTION refold_shared(of bytea, owned bytea)
RETURNS TABLE (cid bigint, low bigint, high bigint, owner bytea, name bytea) LANGUAGE plpgsql STABLE ROWS 1 AS $$
#variable_conflict use_column
BEGIN
    IF of IS NOT NULL THEN
        RETURN QUERY SELECT p.cid, p.low, p.high, c.owner, c.name
        FROM refold_parts(of) p JOIN refold_conversation c ON c.key = of;
        RETURN;
    END IF;
    RETURN QUERY WITH RECURSIVE up (owner, name, parent, high) AS (
        SELECT c.owner, c.name, c.parent, c.fork_at FROM refold_conversation c
        WHERE c.parent IS NOT NULL AND c.owner_key = owned AND c.name IS NOT NULL
        UNION ALL
        SELECT up.owner, up.name, c.parent, least(up.high, c.fork_at)
        FROM up JOIN refold_conversation c ON c.cid = up.parent
    )
    SELECT DISTINCT ON (p.cid) p.cid, p.fork_at, up.high, up.owner, up.name
    FROM up JOIN refold_conversation p ON p.cid = up.parent
    WHERE p.name IS NULL OR p.owner_key <> owned ORDER BY p.cid, up.high DESC;
END $$;

-- From then on, what was followed up to `start` is followed up to `next`; in the order of these, whether it
-- was, which it is not where somebody else was faster or the conversation is gone. No family of these loses
-- anything until the transaction ends.
CREATE FUNCTION refold_follow(of bytea, cids bigint[], starts bigint[], nexts bigint[]) RETURNS SETOF boolean
LANGUAGE plpgsql AS $$
DECLARE
    here record;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM pg_advisory_xact_lock_shared(hashtextextended('family', f.family)) FROM (
        SELECT DISTINCT c.family FROM refold_conversation c WHERE c.cid = ANY (cids) ORDER BY 1
    ) f;
    FOR here IN SELECT * FROM unnest(cids, starts, nexts) u (cid, start, next) LOOP
        IF EXISTS (SELECT 1 FROM refold_conversation c WHERE c.cid = here.cid) THEN
            INSERT INTO refold_followed AS f (cid, what, next) VALUES (here.cid, of, here.next)
            ON CONFLICT (cid, what) DO UPDATE SET next = excluded.next WHERE f.next = here.start;
            RETURN NEXT FOUND;
        ELSE
            RETURN NEXT false;
        END IF;
    END LOOP;
END $$;
