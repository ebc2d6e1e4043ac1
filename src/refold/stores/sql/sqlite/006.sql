-- How far somebody has followed a conversation, by a name; it may be set before the conversation begins.
CREATE TABLE refold_cursor (
    owner BLOB NOT NULL,
    name BLOB NOT NULL,
    cursor BLOB NOT NULL,
    next INTEGER NOT NULL,   -- the first place that was not followed
    PRIMARY KEY (owner, name, cursor)
) WITHOUT ROWID;
