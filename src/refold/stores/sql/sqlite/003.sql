-- When the results of a tool expire, by agent; the agent '' is every agent. NULL is as configured elsewhere.
CREATE TABLE refold_setting (
    agent TEXT NOT NULL CHECK (typeof(agent) = 'text'),
    tool TEXT NOT NULL CHECK (typeof(tool) = 'text' AND tool <> ''),
    after_steps INTEGER CHECK (typeof(after_steps) IN ('integer', 'null') AND after_steps BETWEEN 0 AND 1000000000),
    mode TEXT CHECK (mode IN ('none', 'remove', 'compact')),
    compact_mode TEXT CHECK (compact_mode IN ('first-n-chars', 'ai-summary', 'skeleton')),
    length INTEGER CHECK (typeof(length) IN ('integer', 'null') AND length BETWEEN 0 AND 1000000000),
    prompt TEXT CHECK (typeof(prompt) IN ('text', 'null')),
    strategy TEXT CHECK (strategy IN ('age', 'relevance')),
    threshold REAL CHECK (typeof(threshold) IN ('real', 'null') AND threshold BETWEEN 0 AND 1),
    PRIMARY KEY (agent, tool)
) WITHOUT ROWID;
