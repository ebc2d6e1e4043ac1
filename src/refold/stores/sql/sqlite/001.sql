-- One row per conversation. A fork has its parent's entries before fork_at. An erased conversation
-- whose entries forks still share stays as a row without a name, and goes with the last of them.
CREATE TABLE refold_conversation (
    cid INTEGER PRIMARY KEY AUTOINCREMENT,
    owner BLOB NOT NULL,
    name BLOB,
    created REAL NOT NULL,
    parent INTEGER REFERENCES refold_conversation (cid),
    fork_at INTEGER NOT NULL,
    base BLOB NOT NULL,   -- digest of the entry before the first own one
    seal BLOB NOT NULL,   -- digest of this row
    UNIQUE (owner, name)
);
CREATE INDEX refold_fork ON refold_conversation (parent) WHERE parent IS NOT NULL;

-- The streams. A place is cid * 2^32 + at, so that the row's own key is the compare-and-append.
CREATE TABLE refold_entry (
    place INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    id BLOB,
    head BLOB NOT NULL,
    body BLOB NOT NULL,   -- JSON, or zlib where it begins with an x
    digest BLOB NOT NULL
);
CREATE INDEX refold_entry_fact ON refold_entry (place) WHERE kind <> 'said';
CREATE INDEX refold_entry_id ON refold_entry (id, place) WHERE id IS NOT NULL;

CREATE TABLE refold_snapshot (
    cid INTEGER NOT NULL REFERENCES refold_conversation (cid),
    view BLOB NOT NULL,
    at INTEGER NOT NULL,
    body BLOB NOT NULL,
    digest BLOB NOT NULL,
    PRIMARY KEY (cid, view)
) WITHOUT ROWID;

CREATE TABLE refold_lease (
    cid INTEGER NOT NULL REFERENCES refold_conversation (cid),
    name BLOB NOT NULL,
    holder BLOB NOT NULL,
    fence INTEGER NOT NULL,
    until REAL NOT NULL,
    PRIMARY KEY (cid, name)
) WITHOUT ROWID;
