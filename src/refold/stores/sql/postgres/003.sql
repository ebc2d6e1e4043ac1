-- The most frequent append, in as little time as it can be done in: one entry after another, without a lease.
-- Whether it is stored; where it is not, `refold_append` is to be asked.
CREATE FUNCTION refold_append_next(
    of bytea, place bigint, after bytea, kind bytea, id bytea, head bytea, body bytea, digest bytea
) RETURNS boolean LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    here bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended(encode(of, 'hex'), 0));
    here := (SELECT c.cid FROM refold_conversation c WHERE c.key = of);
    IF after = (SELECT e.digest FROM refold_entry e WHERE e.cid = here AND e.at = place - 1)
        AND NOT EXISTS (SELECT 1 FROM refold_entry e WHERE e.cid = here AND e.at = place)
    THEN
        INSERT INTO refold_entry (cid, at, kind, id, head, body, digest)
        VALUES (here, place, kind, id, head, body, digest);
        RETURN true;
    END IF;
    RETURN false;
END $$;
