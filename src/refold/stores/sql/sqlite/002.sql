-- Small things that outlive conversations, by name.
CREATE TABLE refold_note (
    name BLOB PRIMARY KEY,
    body BLOB NOT NULL
) WITHOUT ROWID;
