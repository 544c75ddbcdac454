BEGIN;
SELECT id FROM row_lock WHERE id = :client_id FOR UPDATE;
COMMIT;
