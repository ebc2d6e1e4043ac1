-- name: configure
SELECT set_config('search_path', coalesce(%(schema)s, current_setting('search_path')), false),
       set_config('statement_timeout', %(statement_ms)s, false),
       set_config('lock_timeout', %(lock_ms)s, false),
       set_config('idle_in_transaction_session_timeout', %(idle_ms)s, false),
       set_config('default_transaction_isolation', 'read committed', false),
       set_config('jit', 'off', false)

-- name: has_schema
-- Not by to_regclass: what that remembers of the catalog may be older than the lock that was waited for.
SELECT EXISTS (SELECT 1 FROM pg_class WHERE relname = 'refold_schema' AND pg_table_is_visible(oid))

-- name: has_namespace
SELECT EXISTS (SELECT 1 FROM pg_namespace WHERE nspname = %(name)s)

-- name: lock_schema
SELECT pg_advisory_xact_lock(hashtextextended('refold_schema', 0))

-- name: create_schema
CREATE TABLE IF NOT EXISTS refold_schema (version integer NOT NULL, format integer NOT NULL)

-- name: get_schema
SELECT version, format FROM refold_schema

-- name: clear_schema
DELETE FROM refold_schema

-- name: set_schema
INSERT INTO refold_schema (version, format) VALUES (%(version)s, %(format)s)

-- name: append_next
SELECT refold_append_next(
    %(key)b, %(first)s::bigint, %(after)b, %(kind)b, %(id)b, %(head)b, %(body)b, %(digest)b
)

-- name: append
SELECT * FROM refold_append(
    %(key)b, %(owner_key)b, %(owner)b, %(name)b, %(now)b, %(again)b, %(first)s::bigint, %(after)b,
    %(lease)b, %(holder)b, %(fence)s::bigint, %(kinds)b::bytea[], %(ids)b::bytea[],
    %(heads)b::bytea[], %(bodies)b::bytea[], %(digests)b::bytea[]
)

-- name: tip
SELECT coalesce(e.at + 1, c.fork_at), coalesce(e.digest, c.base), l.value
FROM refold_conversation c LEFT JOIN LATERAL (
    SELECT t.at, t.digest FROM refold_entry t WHERE t.cid = c.cid ORDER BY t.at DESC LIMIT 1
) e ON true LEFT JOIN refold_shelf l ON l.scope = c.key AND sha256(l.name) = sha256(%(lease)b)
WHERE c.key = %(key)b

-- name: read
SELECT at, kind, id, head, body, digest
FROM refold_read(%(key)b, %(start)s, %(stop)s, %(but)b, %(rows)s::integer, %(bytes)s)

-- name: resume
-- A snapshot begins with its place and a space.
WITH s AS MATERIALIZED (
    SELECT coalesce(substring(encode(substr(s.value, 1, 20), 'escape') FROM '^([0-9]{1,18}) ')::bigint, 0) AS at, s.value
    FROM refold_shelf s WHERE s.scope = %(key)b AND sha256(s.name) = sha256(%(view)b)
)
SELECT -1 - s.at AS at, NULL::bytea, NULL::bytea, NULL::bytea, NULL::bytea, s.value FROM s
UNION ALL
SELECT e.at, e.kind, e.id, e.head, e.body, e.digest FROM refold_read(
    %(key)b, greatest(coalesce((SELECT s.at FROM s), 0) - 1, 0), %(stop)s, NULL, %(rows)s::integer, %(bytes)s
) e ORDER BY at

-- name: fetch
SELECT e.at, e.kind, e.id, e.head, e.body FROM refold_parts(%(key)b) p JOIN refold_entry e
ON e.cid = p.cid AND e.at = ANY (%(places)s::bigint[]) AND e.at >= p.low AND e.at < p.high

-- name: find
SELECT e.id, e.at FROM refold_parts(%(key)b) p CROSS JOIN unnest(%(ids)b::bytea[]) i (id) JOIN refold_entry e
ON e.cid = p.cid AND sha256(e.id) = sha256(i.id) AND e.id = i.id AND e.at >= p.low AND e.at < p.high
ORDER BY e.at

-- name: locate
-- Of each id the newest that said it. What was said in a conversation that is erased is found in that fork of the
-- owner's which shares the most of it.
WITH RECURSIVE above (cid, name, erased, shared, parent, fork_at) AS (
    SELECT f.cid, f.name, p.cid, f.fork_at, p.parent, p.fork_at
    FROM refold_conversation f JOIN refold_conversation p ON p.cid = f.parent
    WHERE f.parent IS NOT NULL AND f.owner_key = %(owner_key)b AND p.owner_key = ''
    UNION ALL
    SELECT a.cid, a.name, p.cid, least(a.shared, a.fork_at), p.parent, p.fork_at
    FROM above a CROSS JOIN LATERAL (
        SELECT * FROM refold_conversation c WHERE c.cid = a.parent AND c.name IS NULL LIMIT 1
    ) p
), heir AS MATERIALIZED (
    SELECT DISTINCT ON (erased) erased, shared, cid, name FROM above ORDER BY erased, shared DESC, cid DESC
)
SELECT DISTINCT ON (i.id) i.id, f.at, f.name FROM unnest(%(ids)b::bytea[]) i (id) CROSS JOIN LATERAL (
    (SELECT e.at, c.cid, c.name FROM refold_entry e JOIN refold_conversation c ON c.cid = e.cid
     WHERE sha256(e.id) = sha256(i.id) AND e.id = i.id AND substr(e.id, 1, 1) = '~'::bytea
     AND c.owner_key = %(owner_key)b ORDER BY e.cid DESC LIMIT 1)
    UNION ALL
    SELECT e.at, h.cid, h.name FROM heir h JOIN refold_entry e
    ON e.cid = h.erased AND sha256(e.id) = sha256(i.id) AND e.id = i.id AND e.at < h.shared
) f ORDER BY i.id, f.cid DESC

-- name: conversations
WITH page AS (
    (SELECT * FROM refold_conversation WHERE %(owner_key)b::bytea IS NULL
     AND name IS NOT NULL AND cid < %(before)s ORDER BY cid DESC LIMIT %(limit)s)
    UNION ALL
    (SELECT * FROM refold_conversation WHERE owner_key = %(owner_key)b
     AND name IS NOT NULL AND cid < %(before)s ORDER BY cid DESC LIMIT %(limit)s)
)
SELECT c.cid, c.owner, c.name, c.created, coalesce(e.at + 1, c.fork_at), o.owner, o.name, coalesce(o.fork_at, 0)
FROM page c LEFT JOIN LATERAL (
    SELECT t.at FROM refold_entry t WHERE t.cid = c.cid ORDER BY t.at DESC LIMIT 1
) e ON true LEFT JOIN LATERAL (
    WITH RECURSIVE up (owner, name, parent, fork_at, above) AS (
        SELECT p.owner, p.name, p.parent, c.fork_at, least(c.fork_at, p.fork_at)
        FROM refold_conversation p WHERE p.cid = c.parent
        UNION ALL
        SELECT p.owner, p.name, p.parent, up.above, least(up.above, p.fork_at)
        FROM up JOIN refold_conversation p ON p.cid = up.parent WHERE up.name IS NULL
    )
    SELECT up.owner, up.name, up.fork_at FROM up WHERE up.name IS NOT NULL
) o ON c.parent IS NOT NULL
ORDER BY c.cid DESC

-- name: hold
SELECT refold_hold(%(key)b)

-- name: add_fork
SELECT refold_add(%(key)b, %(owner_key)b, %(owner)b, %(name)b, %(now)s, %(family)s, %(parent)s, %(fork_at)s, %(base)b)

-- name: digest
SELECT e.digest FROM refold_parts(%(key)b) p JOIN refold_entry e
ON e.cid = p.cid AND e.at = %(at)s AND e.at >= p.low AND e.at < p.high

-- name: conversation
SELECT cid, family, parent, fork_at FROM refold_conversation WHERE key = %(key)b

-- name: hold_family
SELECT pg_advisory_xact_lock(hashtextextended('family', %(family)s::bigint))

-- name: forks
WITH RECURSIVE fork (cid, key, owner, name) AS (
    SELECT cid, key, owner, name FROM refold_conversation WHERE parent = %(cid)s
    UNION ALL
    SELECT c.cid, c.key, c.owner, c.name FROM fork f JOIN refold_conversation c ON c.parent = f.cid
    WHERE f.name IS NULL OR %(and_theirs)s
)
SELECT cid, key, owner, name FROM fork ORDER BY cid DESC LIMIT %(most)s

-- name: bury
UPDATE refold_conversation SET key = NULL, owner_key = '', owner = '', name = NULL, created = 0 WHERE cid = %(cid)s

-- name: buried
SELECT c.parent, c.fork_at, (SELECT max(f.fork_at) FROM refold_conversation f WHERE f.parent = c.cid)
FROM refold_conversation c WHERE c.cid = %(cid)s AND c.name IS NULL

-- name: hand_over
UPDATE refold_conversation SET parent = %(parent)s WHERE parent = %(cid)s RETURNING cid

-- name: seal
UPDATE refold_conversation c SET seal = refold_seal(c) WHERE c.cid = %(cid)s

-- name: erase_entries
DELETE FROM refold_entry WHERE cid = %(cid)s AND at >= %(at)s

-- name: erase_words
DELETE FROM refold_words WHERE cid = %(cid)s AND at >= %(at)s

-- name: erase_vectors
DELETE FROM refold_vector WHERE cid = %(cid)s AND at >= %(at)s

-- name: erase_followed
DELETE FROM refold_followed WHERE cid = %(cid)s

-- name: erase_conversation
DELETE FROM refold_conversation WHERE cid = %(cid)s

-- name: settings
SELECT agent, tool, after_steps, mode, compact_mode, length, prompt, strategy, threshold FROM refold_setting

-- name: set_setting
INSERT INTO refold_setting (agent, tool, after_steps, mode, compact_mode, length, prompt, strategy, threshold)
VALUES (%(agent)b, %(tool)b, %(after_steps)s, %(mode)s, %(compact_mode)s, %(length)s,
        %(prompt)b, %(strategy)s, %(threshold)s)
ON CONFLICT (sha256(agent), sha256(tool)) DO UPDATE SET after_steps = excluded.after_steps,
    mode = excluded.mode, compact_mode = excluded.compact_mode, length = excluded.length,
    prompt = excluded.prompt, strategy = excluded.strategy, threshold = excluded.threshold

-- name: unset_setting
DELETE FROM refold_setting WHERE sha256(agent) = sha256(%(agent)b) AND sha256(tool) = sha256(%(tool)b)

-- name: lift_timeout
SELECT set_config('statement_timeout', '0', true)

-- name: lift_lock_timeout
SELECT set_config('lock_timeout', '0', true)

-- name: altered
SELECT name FROM refold_conversation c WHERE seal <> refold_seal(c)

-- name: strays
SELECT 'entries', count(*) FROM refold_entry e
WHERE NOT EXISTS (SELECT 1 FROM refold_conversation c WHERE c.cid = e.cid) HAVING count(*) > 0
UNION ALL
SELECT 'places in the index', count(*) FROM refold_words w
WHERE NOT EXISTS (SELECT 1 FROM refold_entry e WHERE e.cid = w.cid AND e.at = w.at) HAVING count(*) > 0
UNION ALL
SELECT 'vectors', count(*) FROM refold_vector v
WHERE NOT EXISTS (SELECT 1 FROM refold_entry e WHERE e.cid = v.cid AND e.at = v.at) HAVING count(*) > 0

-- name: behind
SELECT c.cid, coalesce(f.next, 0), c.owner_key FROM (
    SELECT s.cid FROM refold_shared(%(key)b, %(owner_key)b) s
    UNION
    SELECT o.cid FROM refold_conversation o WHERE %(key)b::bytea IS NULL AND o.owner_key = %(owner_key)b
) s JOIN refold_conversation c ON c.cid = s.cid LEFT JOIN refold_followed f ON f.cid = c.cid AND f.what = %(what)b
WHERE c.cid >= %(first)s AND EXISTS (SELECT 1 FROM refold_entry e WHERE e.cid = c.cid AND e.at >= coalesce(f.next, 0))
ORDER BY c.cid LIMIT %(limit)s

-- name: read_behind
SELECT cid, at, kind, id, head, body FROM (
    SELECT e.*, row_number() OVER place AS n, sum(octet_length(e.body)) OVER place AS size
    FROM unnest(%(cids)s::bigint[], %(starts)s::bigint[]) WITH ORDINALITY b (cid, start, nth) CROSS JOIN LATERAL (
        SELECT b.nth, r.* FROM refold_entry r WHERE r.cid = b.cid AND r.at >= b.start
        ORDER BY r.at LIMIT %(rows)s
    ) e WINDOW place AS (ORDER BY e.nth, e.at)
) f WHERE n <= %(rows)s AND size - octet_length(body) < %(bytes)s ORDER BY nth, at

-- name: follow
SELECT * FROM refold_follow(%(what)b, %(cids)s::bigint[], %(starts)s::bigint[], %(nexts)s::bigint[])

-- name: add_words
INSERT INTO refold_words (cid, at, terms, words, tools, role)
SELECT e.cid, e.at, u.terms::tsvector, u.words, ARRAY(SELECT decode(t, 'hex') FROM unnest(string_to_array(u.tools, ' ')) t), u.role
FROM unnest(%(cids)s::bigint[], %(ats)s::bigint[], %(terms)s::text[], %(words)s::text[], %(tools)s::text[],
            %(roles)b::bytea[]) u (cid, at, terms, words, tools, role)
JOIN refold_entry e ON e.cid = u.cid AND e.at = u.at ON CONFLICT (cid, at) DO NOTHING

-- name: add_vectors
INSERT INTO refold_vector (cid, what, at, n, vector) SELECT e.cid, %(what)b, e.at, u.n, u.vector
FROM unnest(%(cids)s::bigint[], %(ats)s::bigint[], %(ns)s::integer[], %(vectors)b::bytea[]) u (cid, at, n, vector)
JOIN refold_entry e ON e.cid = u.cid AND e.at = u.at ON CONFLICT DO NOTHING

-- name: search
WITH part AS MATERIALIZED (SELECT * FROM refold_shared(%(key)b, %(owner_key)b)), within AS MATERIALIZED (
    SELECT string_agg(one, ' | ')::tsquery AS terms FROM (
        SELECT %(place)s || cid FROM part UNION ALL SELECT %(owned)s::text WHERE %(key)b::bytea IS NULL
    ) w (one)
)
SELECT w.cid, w.at, w.owner, w.name, w.words, w.tools, w.role
FROM unnest(%(matches)s::text[], %(phrases)s::text[], %(wholes)s::text[]) m (match, phrases, whole), within
CROSS JOIN LATERAL (
    SELECT f.*, row_number() OVER newest AS n, sum(octet_length(f.words)) OVER newest AS size FROM (
        SELECT t.cid, t.at, t.words, t.tools, t.role,
            coalesce(p.owner, c.owner) AS owner, coalesce(p.name, c.name) AS name
        FROM refold_words t LEFT JOIN part p ON p.cid = t.cid AND t.at >= p.low AND t.at < p.high
        LEFT JOIN refold_conversation c ON c.cid = t.cid AND c.owner_key = %(owner_key)b AND %(key)b::bytea IS NULL
        WHERE t.terms @@ (m.match::tsquery && within.terms) AND (p.cid IS NOT NULL OR c.cid IS NOT NULL)
        AND refold_has(t.words, CASE WHEN t.terms @@ %(long)s::tsquery THEN m.whole ELSE m.phrases END)
        ORDER BY t.cid DESC, t.at DESC LIMIT %(pool)s
    ) f WINDOW newest AS (ORDER BY f.cid DESC, f.at DESC)
) w WHERE w.n <= %(limit)s OR w.size <= %(bytes)s

-- name: vectors
SELECT v.cid, v.at, p.owner, p.name, v.vector FROM refold_shared(%(key)b, %(owner_key)b) p
JOIN refold_vector v ON v.cid = p.cid AND v.what = %(what)b AND v.at >= p.low AND v.at < p.high
UNION ALL
SELECT v.cid, v.at, c.owner, c.name, v.vector FROM refold_conversation c
JOIN refold_vector v ON v.cid = c.cid AND v.what = %(what)b
WHERE %(key)b::bytea IS NULL AND c.owner_key = %(owner_key)b AND c.name IS NOT NULL

-- name: get_value
SELECT value FROM refold_shelf WHERE scope = %(scope)b AND sha256(name) = sha256(%(name)b)

-- name: put_value
INSERT INTO refold_shelf (scope, name, value) SELECT %(scope)b, %(name)b, %(value)b
FROM set_config('synchronous_commit',
    CASE WHEN %(durable)s THEN current_setting('synchronous_commit') ELSE 'off' END, true)
WHERE CASE WHEN %(scope)b = ''::bytea THEN true ELSE refold_hold(%(scope)b) IS NOT NULL END
ON CONFLICT (scope, sha256(name)) DO UPDATE SET value = excluded.value

-- name: add_value
INSERT INTO refold_shelf (scope, name, value) SELECT %(scope)b, %(name)b, %(value)b
WHERE CASE WHEN %(scope)b = ''::bytea THEN true ELSE refold_hold(%(scope)b) IS NOT NULL OR %(early)s END
ON CONFLICT (scope, sha256(name)) DO NOTHING RETURNING true

-- name: replace_value
-- Holds the conversation, since an append with a lease must not overlap with its next holder.
WITH held AS MATERIALIZED (SELECT CASE WHEN %(scope)b = ''::bytea THEN NULL ELSE refold_hold(%(scope)b) END)
UPDATE refold_shelf SET value = %(value)b FROM held
WHERE scope = %(scope)b AND sha256(name) = sha256(%(name)b) AND value = %(old)b RETURNING true

-- name: remove_value
DELETE FROM refold_shelf WHERE scope = %(scope)b AND sha256(name) = sha256(%(name)b)

-- name: values
SELECT name, value FROM refold_shelf
WHERE scope = %(scope)b AND substr(name, 1, length(%(prefix)b::bytea)) = %(prefix)b

-- name: shelved
SELECT s.scope, c.owner, c.name, s.value, coalesce(e.at + 1, c.fork_at)
FROM refold_shelf s JOIN refold_conversation c ON c.key = s.scope LEFT JOIN LATERAL (
    SELECT t.at FROM refold_entry t WHERE t.cid = c.cid ORDER BY t.at DESC LIMIT 1
) e ON true WHERE sha256(s.name) = sha256(%(name)b) AND s.scope > %(after)b
AND (%(owner_key)b::bytea IS NULL OR c.owner_key = %(owner_key)b)
ORDER BY s.scope LIMIT %(limit)s

-- name: erase_shelf
DELETE FROM refold_shelf WHERE scope = %(scope)b

-- name: job_lock
-- The queue of compactions is in the tables of procrastinate. `errand`, `round` and the workers' notes are in
-- `args`.
SELECT pg_advisory_xact_lock(hashtextextended(%(lock)s, 7))

-- name: job_lock_of
SELECT pg_advisory_xact_lock(hashtextextended(lock, 7)) FROM procrastinate_jobs WHERE id = %(id)s

-- name: job_tables
SELECT bool_or(relname = 'procrastinate_jobs') IS TRUE, bool_or(relname = 'refold_jobs') IS TRUE
FROM pg_class WHERE relname IN ('procrastinate_jobs', 'refold_jobs') AND pg_table_is_visible(oid)

-- name: job_index
CREATE INDEX refold_jobs ON procrastinate_jobs (lock) WHERE queue_name = 'refold'

-- name: job_known
SELECT id, status = 'failed', CASE WHEN status = 'failed' OR args ? 'vain' THEN args ->> 'told' END
FROM procrastinate_jobs
WHERE queue_name = 'refold' AND lock = %(lock)s AND queueing_lock = %(queueing_lock)s
  AND (status IN ('todo', 'doing') OR args ->> 'round' = %(round)s AND (status = 'failed' OR args ? 'vain'))
ORDER BY id DESC LIMIT 1

-- name: job_progress
SELECT CASE
    WHEN status NOT IN ('todo', 'doing') THEN 'ended'
    WHEN EXISTS (SELECT FROM procrastinate_workers
                 WHERE last_heartbeat > now() - make_interval(secs => %(timeout_s)s))
     AND EXISTS (SELECT FROM refold_shelf
                 WHERE scope = '' AND sha256(name) = sha256('worker'::bytea)
                   AND convert_from(value, 'UTF8')::float8 > extract(epoch FROM now()) - %(timeout_s)s)
    THEN 'active' ELSE 'unserved' END
FROM procrastinate_jobs WHERE id = %(id)s

-- name: job_beat
-- That a worker of ours is there: those of other queues are workers too.
INSERT INTO refold_shelf (scope, name, value)
VALUES ('', 'worker'::bytea, convert_to(extract(epoch FROM now())::text, 'UTF8'))
ON CONFLICT (scope, sha256(name)) DO UPDATE SET value = excluded.value

-- name: job_list
SELECT id, status, errand, attempts, created, changed, due, worker, told FROM (
    SELECT job.id, job.attempts,
           CASE job.status WHEN 'todo' THEN 'queued' WHEN 'doing' THEN 'running'
                           WHEN 'failed' THEN 'failed' ELSE 'done' END AS status,
           min(event.at) AS created, max(event.at) FILTER (WHERE event.type <> 'scheduled') AS changed,
           CASE job.status WHEN 'todo' THEN job.scheduled_at END AS due,
           job.args ->> 'errand' AS errand, job.args ->> 'worker' AS worker, job.args ->> 'told' AS told
    FROM procrastinate_jobs job JOIN procrastinate_events event ON event.job_id = job.id
    WHERE job.queue_name = 'refold' AND job.task_name = %(task)s
      AND (%(id)s::bigint IS NULL OR job.id = %(id)s)
    GROUP BY job.id
) job
WHERE status = coalesce(%(status)s, status) AND (status <> 'done' OR changed > to_timestamp(%(since)s))
ORDER BY id DESC LIMIT %(limit)s

-- name: job_retry
UPDATE procrastinate_jobs job SET status = 'todo', attempts = 0, scheduled_at = NULL
WHERE id = %(id)s AND status = 'failed'
  AND NOT EXISTS (
      SELECT FROM procrastinate_jobs other
      WHERE other.queueing_lock = job.queueing_lock AND other.status IN ('todo', 'doing'))
RETURNING id

-- name: job_drop
DELETE FROM procrastinate_jobs WHERE id = %(id)s AND status = 'failed'

-- name: job_note
UPDATE procrastinate_jobs SET args = args || %(notes)s WHERE id = %(id)s

-- name: job_recover
WITH lost AS (
    SELECT job.id
    FROM procrastinate_jobs job LEFT JOIN procrastinate_workers worker ON worker.id = job.worker_id
    WHERE job.queue_name = 'refold' AND job.status = 'doing'
      AND (worker.id IS NULL OR worker.last_heartbeat < now() - make_interval(secs => %(lost_s)s))
    FOR UPDATE OF job SKIP LOCKED
)
UPDATE procrastinate_jobs job
SET status = CASE WHEN attempts + 1 < %(attempts)s THEN 'todo'::procrastinate_job_status ELSE 'failed' END,
    attempts = attempts + 1,
    scheduled_at = NULL,
    args = args || '{"told": "its worker was not heard of any more"}'
FROM lost WHERE job.id = lost.id

-- name: job_forget
DELETE FROM procrastinate_jobs job
WHERE queue_name = 'refold' AND status IN ('succeeded', 'cancelled', 'aborted')
  AND NOT EXISTS (
      SELECT FROM procrastinate_events event
      WHERE event.job_id = job.id AND event.at > now() - make_interval(secs => %(keep_s)s))
