-- Small values by name: of a conversation ("LENGTH:OWNER" and its name) or of the whole store (no scope). They
-- replace a table each for notes, cursors, summaries, leases and snapshots; the last two begin empty.
CREATE TABLE refold_shelf (
    scope BLOB NOT NULL,
    name BLOB NOT NULL,
    value BLOB NOT NULL CHECK (typeof(value) = 'blob'),
    PRIMARY KEY (scope, name)
) WITHOUT ROWID;
CREATE INDEX refold_shelf_name ON refold_shelf (name);

INSERT INTO refold_shelf SELECT x'', name, CAST(body AS BLOB) FROM refold_note;
INSERT INTO refold_shelf
SELECT CAST(length(owner) || ':' || owner || name AS BLOB), CAST('c:' || cursor AS BLOB), CAST(next AS BLOB)
FROM refold_cursor;
INSERT INTO refold_shelf
SELECT CAST(length(c.owner) || ':' || c.owner || c.name AS BLOB), CAST('~' || lower(hex(s.digest)) AS BLOB), CAST(s.body AS BLOB)
FROM refold_summary s JOIN refold_conversation c ON c.cid = s.cid WHERE c.name IS NOT NULL;

DROP TABLE refold_note;
DROP TABLE refold_cursor;
DROP TABLE refold_summary;
DROP TABLE refold_lease;
DROP TABLE refold_snapshot;
