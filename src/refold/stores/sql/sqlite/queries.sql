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

-- name: conversation
SELECT cid, parent, fork_at, base FROM refold_conversation WHERE owner = :owner AND name = :name

-- name: ancestor
SELECT cid, parent, fork_at, base FROM refold_conversation WHERE cid = :cid

-- name: conversations
SELECT c.owner, c.name, c.created, c.fork_at, p.owner, p.name,
       (SELECT max(e.place) FROM refold_entry e WHERE e.place >= c.cid << 32 AND e.place < (c.cid + 1) << 32)
FROM refold_conversation c LEFT JOIN refold_conversation p ON p.cid = c.parent
WHERE :owner IS NULL OR c.owner = :owner
ORDER BY c.cid DESC

-- name: seals
SELECT cid, owner, name, created, parent, fork_at, base, seal FROM refold_conversation

-- name: add_conversation
INSERT INTO refold_conversation (owner, name, created, parent, fork_at, base, seal)
VALUES (:owner, :name, :created, :parent, :fork_at, :base, x'')

-- name: row
SELECT cid, owner, name, created, parent, fork_at, base FROM refold_conversation WHERE cid = :cid

-- name: set_seal
UPDATE refold_conversation SET seal = :seal WHERE cid = :cid

-- name: last
SELECT place, digest FROM refold_entry WHERE place >= :low AND place < :high ORDER BY place DESC LIMIT 1

-- name: digest
SELECT digest FROM refold_entry WHERE place = :place

-- name: append
INSERT INTO refold_entry (place, kind, id, head, body, digest)
VALUES (:place, :kind, :id, :head, :body, :digest)

-- name: read
SELECT place, kind, id, head, body, digest FROM refold_entry
WHERE place >= :low AND place < :high ORDER BY place LIMIT :limit

-- name: read_but
SELECT place, kind, id, head, body, digest FROM refold_entry
WHERE place >= :low AND place < :high AND kind <> :but ORDER BY place LIMIT :limit

-- name: find
SELECT place FROM refold_entry WHERE id = :id AND place >= :low AND place < :high

-- name: forks
SELECT cid, fork_at, owner, name FROM refold_conversation WHERE parent = :cid ORDER BY fork_at DESC, cid

-- name: hand_over
UPDATE refold_entry SET place = place + :shift WHERE place >= :low AND place < :high

-- name: erase_entries
DELETE FROM refold_entry WHERE place >= :low AND place < :high

-- name: erase_snapshots
DELETE FROM refold_snapshot WHERE cid = :cid

-- name: erase_leases
DELETE FROM refold_lease WHERE cid = :cid

-- name: erase_conversation
DELETE FROM refold_conversation WHERE cid = :cid

-- name: rebase
UPDATE refold_conversation SET parent = :parent, fork_at = :fork_at, base = :base WHERE cid = :cid

-- name: save
INSERT INTO refold_snapshot (cid, view, at, body, digest) VALUES (:cid, :view, :at, :body, :digest)
ON CONFLICT DO UPDATE SET at = excluded.at, body = excluded.body, digest = excluded.digest
WHERE excluded.at >= at

-- name: saved
SELECT view, at, body, digest FROM refold_snapshot WHERE cid = :cid

-- name: lease
SELECT name, holder, fence, until FROM refold_lease WHERE cid = :cid AND name = :name

-- name: leases
SELECT name, holder, fence, until FROM refold_lease WHERE cid = :cid AND until > :now

-- name: set_lease
INSERT INTO refold_lease (cid, name, holder, fence, until) VALUES (:cid, :name, :holder, :fence, :until)
ON CONFLICT DO UPDATE SET holder = excluded.holder, fence = excluded.fence, until = excluded.until

-- name: end_lease
UPDATE refold_lease SET until = 0 WHERE cid = :cid AND name = :name AND fence = :fence

-- name: strays
SELECT count(*) FROM refold_entry WHERE place >> 32 NOT IN (SELECT cid FROM refold_conversation)
