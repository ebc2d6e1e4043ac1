-- The queue of compactions, in the tables of procrastinate. `round` and what workers note stand in `args`.

-- name: one_at_a_time
SELECT pg_advisory_xact_lock(hashtextextended(%s, 7));

-- name: is_there
SELECT bool_or(relname = 'procrastinate_jobs') IS TRUE, bool_or(relname = 'refold_jobs') IS TRUE
FROM pg_class WHERE relname IN ('procrastinate_jobs', 'refold_jobs') AND pg_table_is_visible(oid);

-- name: make_index
CREATE INDEX refold_jobs ON procrastinate_jobs (lock) WHERE queue_name = 'refold';

-- name: known
SELECT id, status = 'failed', CASE WHEN status = 'failed' OR args ? 'vain' THEN args ->> 'told' END
FROM procrastinate_jobs
WHERE queue_name = 'refold' AND lock = %s AND queueing_lock = %s
  AND (status IN ('todo', 'doing') OR args ->> 'round' = %s AND (status = 'failed' OR args ? 'vain'))
ORDER BY id DESC LIMIT 1;

-- name: look
SELECT status IN ('todo', 'doing'),
       EXISTS (SELECT FROM procrastinate_workers WHERE last_heartbeat > now() - make_interval(secs => %s))
       AND EXISTS (SELECT FROM refold_shelf WHERE scope = '' AND sha256(name) = sha256('worker'::bytea)
                   AND convert_from(value, 'UTF8')::float8 > extract(epoch FROM now()) - %s)
FROM procrastinate_jobs WHERE id = %s;

-- name: beat
-- That a worker of ours is there: those of other queues are workers too.
INSERT INTO refold_shelf (scope, name, value)
VALUES ('', 'worker'::bytea, convert_to(extract(epoch FROM now())::text, 'UTF8'))
ON CONFLICT (scope, sha256(name)) DO UPDATE SET value = excluded.value;

-- name: posted
SELECT job.id, job.args, job.status, job.attempts, min(event.at),
       max(event.at) FILTER (WHERE event.type <> 'scheduled'), job.scheduled_at
FROM procrastinate_jobs job JOIN procrastinate_events event ON event.job_id = job.id
WHERE job.queue_name = 'refold'
  AND (%s::bigint IS NULL OR job.id = %s)
  AND job.status::text = ANY (%s)
GROUP BY job.id
HAVING job.status IN ('todo', 'doing', 'failed')
    OR max(event.at) FILTER (WHERE event.type <> 'scheduled') > to_timestamp(%s)
ORDER BY job.id DESC LIMIT %s;

-- name: retry
UPDATE procrastinate_jobs job SET status = 'todo', attempts = 0, scheduled_at = NULL
WHERE id = %s AND status = 'failed'
  AND NOT EXISTS (
      SELECT FROM procrastinate_jobs other
      WHERE other.queueing_lock = job.queueing_lock AND other.status IN ('todo', 'doing'))
RETURNING id;

-- name: drop
DELETE FROM procrastinate_jobs WHERE id = %s AND status = 'failed';

-- name: note
UPDATE procrastinate_jobs SET args = args || %s WHERE id = %s;

-- name: recover
WITH lost AS (
    SELECT job.id
    FROM procrastinate_jobs job LEFT JOIN procrastinate_workers worker ON worker.id = job.worker_id
    WHERE job.queue_name = 'refold' AND job.status = 'doing'
      AND (worker.id IS NULL OR worker.last_heartbeat < now() - make_interval(secs => %s))
    FOR UPDATE OF job SKIP LOCKED
)
UPDATE procrastinate_jobs job
SET status = CASE WHEN attempts + 1 < %s THEN 'todo'::procrastinate_job_status ELSE 'failed' END,
    attempts = attempts + 1,
    scheduled_at = NULL,
    args = args || '{"told": "its worker was not heard of any more"}'
FROM lost WHERE job.id = lost.id
RETURNING job.id;

-- name: forget
DELETE FROM procrastinate_jobs job
WHERE queue_name = 'refold' AND status IN ('succeeded', 'cancelled', 'aborted')
  AND NOT EXISTS (
      SELECT FROM procrastinate_events event
      WHERE event.job_id = job.id AND event.at > now() - make_interval(secs => %s));
