-- name: has_schema
SELECT count(*) FROM sqlite_schema WHERE name = 'refold_schema'

-- name: create_schema
CREATE TABLE IF NOT EXISTS refold_schema (version INTEGER NOT NULL, format INTEGER NOT NULL)

-- name: get_schema
SELECT version, format FROM refold_schema

-- name: clear_schema
DELETE FROM refold_schema

-- name: set_schema
INSERT INTO refold_schema (version, format) VALUES (:version, :format)

-- name: segments
WITH RECURSIVE segment (cid, low, high, parent, depth) AS (
    SELECT cid, fork_at, 1 << 32, parent, 0 FROM refold_conversation WHERE owner = :owner AND name = :name
    UNION ALL
    SELECT c.cid, c.fork_at, min(s.low, s.high), c.parent, s.depth + 1
    FROM segment s JOIN refold_conversation c ON c.cid = s.parent
)
SELECT cid, low, high FROM segment ORDER BY depth DESC

-- name: conversations
SELECT c.owner, c.name, c.created, c.parent, c.fork_at,
       (SELECT max(e.place) FROM refold_entry e WHERE e.place >= c.cid << 32 AND e.place < (c.cid + 1) << 32)
FROM refold_conversation c
WHERE c.name IS NOT NULL AND (:owner IS NULL OR c.owner = :owner)
ORDER BY c.cid DESC

-- name: seals
SELECT cid, owner, name, created, parent, fork_at, base, seal FROM refold_conversation

-- name: add_conversation
INSERT INTO refold_conversation (owner, name, created, parent, fork_at, base, seal)
VALUES (:owner, :name, :created, :parent, :fork_at, :base, x'') RETURNING cid

-- name: row
SELECT cid, owner, name, created, parent, fork_at, base FROM refold_conversation WHERE cid = :cid

-- name: set_seal
UPDATE refold_conversation SET seal = :seal WHERE cid = :cid

-- name: tip
SELECT c.cid, c.fork_at, c.base, e.place, e.digest
FROM refold_conversation c LEFT JOIN refold_entry e ON e.place = (
    SELECT max(l.place) FROM refold_entry l WHERE l.place >= c.cid << 32 AND l.place < (c.cid + 1) << 32
)
WHERE c.owner = :owner AND c.name = :name

-- name: digest
SELECT digest FROM refold_entry WHERE place = :place

-- name: append
INSERT INTO refold_entry (place, kind, id, head, body, digest)
VALUES (:place, :kind, :id, :head, :body, :digest)

-- name: read
SELECT place, kind, id, head, body, digest FROM refold_entry
WHERE place >= :low AND place < :high AND kind IS NOT :but ORDER BY place LIMIT :limit

-- name: read_unsaid
SELECT place, kind, id, head, body, digest FROM refold_entry
WHERE place >= :low AND place < :high AND kind <> 'said' ORDER BY place LIMIT :limit

-- name: find
SELECT place FROM refold_entry WHERE id = :id AND place >= :low AND place < :high

-- name: locate
SELECT e.place, c.name FROM refold_entry e JOIN refold_conversation c ON c.cid = e.place >> 32
WHERE e.id = :id AND (c.owner = :owner OR c.name IS NULL) ORDER BY e.place

-- name: heirs
WITH RECURSIVE heir (cid, owner, name, shared) AS (
    SELECT cid, owner, name, fork_at FROM refold_conversation WHERE parent = :cid
    UNION ALL
    SELECT c.cid, c.owner, c.name, min(h.shared, c.fork_at)
    FROM heir h JOIN refold_conversation c ON c.parent = h.cid WHERE h.name IS NULL
)
SELECT name, shared FROM heir WHERE name IS NOT NULL AND owner = :owner ORDER BY cid

-- name: forks
WITH RECURSIVE fork (cid, owner, name) AS (
    SELECT cid, owner, name FROM refold_conversation WHERE parent = :cid
    UNION ALL
    SELECT c.cid, c.owner, c.name FROM fork f JOIN refold_conversation c ON c.parent = f.cid
    WHERE f.name IS NULL OR :and_theirs
)
SELECT cid, owner, name FROM fork ORDER BY cid

-- name: bury
UPDATE refold_conversation SET owner = x'', name = NULL, created = 0 WHERE cid = :cid

-- name: buried
SELECT c.parent, c.fork_at, (SELECT max(f.fork_at) FROM refold_conversation f WHERE f.parent = c.cid)
FROM refold_conversation c WHERE c.cid = :cid AND c.name IS NULL

-- name: hand_over
UPDATE refold_conversation SET parent = :parent WHERE parent = :cid RETURNING cid

-- name: erase_entries
DELETE FROM refold_entry WHERE place >= (:cid << 32) + :at AND place < (:cid + 1) << 32

-- name: erase_words
DELETE FROM refold_search WHERE rowid >= (:cid << 32) + :at AND rowid < (:cid + 1) << 32

-- name: erase_vectors
DELETE FROM refold_vector WHERE place >= (:cid << 32) + :at AND place < (:cid + 1) << 32

-- name: erase_followed
DELETE FROM refold_followed WHERE cid = :cid

-- name: merge_words
INSERT INTO refold_search (refold_search, rank) VALUES ('merge', :pages)

-- name: erase_conversation
DELETE FROM refold_conversation WHERE cid = :cid

-- name: truncate_log
PRAGMA wal_checkpoint(TRUNCATE)

-- name: integrity_check
PRAGMA integrity_check

-- name: strays
SELECT 'entries', count(*) AS strays FROM refold_entry
WHERE place >> 32 NOT IN (SELECT cid FROM refold_conversation) HAVING strays
UNION ALL
SELECT 'places in the index', count(*) AS strays FROM refold_search_docsize
WHERE id NOT IN (SELECT place FROM refold_entry) HAVING strays
UNION ALL
SELECT 'vectors', count(*) AS strays FROM refold_vector
WHERE place NOT IN (SELECT place FROM refold_entry) HAVING strays

-- name: behind
SELECT c.cid FROM refold_conversation c
LEFT JOIN refold_followed f ON f.cid = c.cid AND f.what = :what
WHERE c.owner IN (:owner, x'') AND EXISTS (
    SELECT 1 FROM refold_entry e
    WHERE e.place >= coalesce(f.next, c.cid << 32) AND e.place < (c.cid + 1) << 32
)

-- name: followed
SELECT coalesce((SELECT next FROM refold_followed WHERE cid = c.cid AND what = :what), c.cid << 32), c.owner
FROM refold_conversation c WHERE c.cid = :cid

-- name: follow
INSERT INTO refold_followed (cid, what, next) VALUES (:cid, :what, :next)
ON CONFLICT DO UPDATE SET next = excluded.next

-- name: add_words
INSERT INTO refold_search (rowid, text, parts, about)
SELECT :place, :text, :parts, :about WHERE EXISTS (SELECT 1 FROM refold_entry WHERE place = :place)

-- name: add_vector
INSERT OR REPLACE INTO refold_vector (place, embedder, n, vector)
SELECT :place, :embedder, :n, :vector WHERE EXISTS (SELECT 1 FROM refold_entry WHERE place = :place)

-- name: several_owners
SELECT (SELECT owner FROM refold_conversation WHERE name IS NOT NULL ORDER BY owner LIMIT 1)
    <> (SELECT owner FROM refold_conversation WHERE name IS NOT NULL ORDER BY owner DESC LIMIT 1)

-- name: inherited
WITH RECURSIVE up (name, cid, parent, high) AS (
    SELECT name, cid, parent, fork_at FROM refold_conversation INDEXED BY refold_fork
    WHERE parent IS NOT NULL AND owner = :owner AND name IS NOT NULL
    UNION ALL
    SELECT up.name, c.cid, c.parent, min(up.high, c.fork_at)
    FROM up JOIN refold_conversation c ON c.cid = up.parent
)
SELECT p.cid, up.high, up.name FROM up JOIN refold_conversation p ON p.cid = up.parent
WHERE p.name IS NULL OR p.owner <> :owner ORDER BY up.high DESC

-- name: match
SELECT place, score FROM (
    SELECT rowid AS place, coalesce(:score, -bm25(refold_search, 2.0, 1.0, 0.0)) AS score FROM refold_search
    WHERE refold_search MATCH :match AND rowid >= :low AND rowid < :high ORDER BY rowid DESC LIMIT :pool
) ORDER BY score DESC, place DESC LIMIT :limit

-- name: match_owned
SELECT place, score FROM (
    SELECT rowid AS place, coalesce(:score, -bm25(refold_search, 2.0, 1.0, 0.0)) AS score FROM refold_search
    WHERE refold_search MATCH :match AND EXISTS (
        SELECT 1 FROM refold_conversation c
        WHERE c.cid = refold_search.rowid >> 32 AND c.owner = :owner AND c.name IS NOT NULL
    ) ORDER BY rowid DESC LIMIT :pool
) ORDER BY score DESC, place DESC LIMIT :limit

-- name: vectors
SELECT place, vector FROM refold_vector WHERE place >= :low AND place < :high AND embedder = :embedder

-- name: vectors_owned
SELECT v.place, v.vector FROM refold_conversation c
JOIN refold_vector v ON v.place >= c.cid << 32 AND v.place < (c.cid + 1) << 32
WHERE c.owner = :owner AND c.name IS NOT NULL AND v.embedder = :embedder

-- name: settings
SELECT CAST(agent AS BLOB), CAST(tool AS BLOB), after_steps, mode, compact_mode, length,
       CAST(prompt AS BLOB), strategy, threshold
FROM refold_setting

-- name: set_setting
INSERT INTO refold_setting (agent, tool, after_steps, mode, compact_mode, length, prompt, strategy, threshold)
VALUES (CAST(:agent AS TEXT), CAST(:tool AS TEXT), :after_steps, :mode, :compact_mode, :length,
        CAST(:prompt AS TEXT), :strategy, :threshold)

-- name: unset_setting
DELETE FROM refold_setting WHERE agent = CAST(:agent AS TEXT) AND tool = CAST(:tool AS TEXT)

-- name: get_value
SELECT value FROM refold_shelf WHERE scope = :scope AND name = :name

-- name: put_value
INSERT OR REPLACE INTO refold_shelf (scope, name, value) VALUES (:scope, :name, :value)

-- name: remove_value
DELETE FROM refold_shelf WHERE scope = :scope AND name = :name

-- name: values
SELECT name, value FROM refold_shelf WHERE scope = :scope AND name >= :low AND name < :high

-- name: shelved
SELECT scope FROM refold_shelf WHERE name = :name AND scope <> x''

-- name: erase_shelf
DELETE FROM refold_shelf WHERE scope = :scope
