-- What models wrote and somebody paid for, by a digest of what they were asked.
CREATE TABLE refold_summary (
    made INTEGER PRIMARY KEY,   -- grows, so that the first to go is the oldest
    cid INTEGER NOT NULL REFERENCES refold_conversation (cid),
    digest BLOB NOT NULL,
    body BLOB NOT NULL,   -- packed as an entry's
    UNIQUE (digest, cid)
);
CREATE INDEX refold_summary_cid ON refold_summary (cid);
