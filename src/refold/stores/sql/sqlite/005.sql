-- What can be found: words by place, without the texts; about is tools, role and owner, as words that no
-- text has.
CREATE VIRTUAL TABLE refold_search USING fts5 (
    text, parts, about, content = '', contentless_delete = 1, tokenize = 'ascii', prefix = '3'
);

-- What entries mean: some vectors of float32 for each, by embedder.
CREATE TABLE refold_vector (
    place INTEGER NOT NULL,
    embedder BLOB NOT NULL,
    n INTEGER NOT NULL,
    vector BLOB NOT NULL,
    PRIMARY KEY (place, embedder, n)
) WITHOUT ROWID;

-- How far each of these has followed a conversation.
CREATE TABLE refold_followed (
    cid INTEGER NOT NULL REFERENCES refold_conversation (cid),
    what BLOB NOT NULL,   -- x'' for words, else the embedder
    next INTEGER NOT NULL,   -- the first place that is not in it
    PRIMARY KEY (cid, what)
) WITHOUT ROWID;
