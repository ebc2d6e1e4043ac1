-- In the order of conversations, so that the newest that said something is found without looking at the others.
DROP INDEX IF EXISTS refold_entry_located;
CREATE INDEX refold_entry_located ON refold_entry (sha256(id), cid) WHERE substr(id, 1, 1) = '~'::bytea;
