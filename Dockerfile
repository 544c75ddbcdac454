# PostgreSQL with dlock, from the official image
#
#	docker build -t postgres-dlock .
#	docker run --shm-size=256m -e POSTGRES_PASSWORD=secret postgres-dlock
#
# The database POSTGRES_DB has the extension.  compose.yaml adds a health check.
# Locks are in /dev/shm, of which a container has 64 MB by default.

ARG PG_MAJOR=17
FROM postgres:$PG_MAJOR
ARG PG_MAJOR

COPY . /usr/src/dlock
RUN apt-get update \
 && apt-get install -y --no-install-recommends \
	make gcc libc6-dev "postgresql-server-dev-$PG_MAJOR" \
 && make -C /usr/src/dlock clean with_llvm=no \
 && make -C /usr/src/dlock install with_llvm=no \
 && rm -rf /usr/src/dlock /var/lib/apt/lists/* \
 && apt-get purge -y --auto-remove make gcc libc6-dev "postgresql-server-dev-$PG_MAJOR"

# run once, after the database POSTGRES_DB is created
RUN echo 'CREATE EXTENSION dlock;' >/docker-entrypoint-initdb.d/dlock.sql
