"""What Alembic would do to a database, to have it as the application's models are.

    alembic_tool.py DATABASE [schemas] [advised]

The models are a table "account", which is there, and a table "note", which is
not.  "schemas" has it look at all schemas, "advised" is what the pages advise.
Each line is an operation and what it is for.  libpq's environment variables say
where the server is; test/t/client_schema_tools.pl sets them.
"""

import re
import sys

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Column, Integer, MetaData, Table, create_engine

models = MetaData()
for table in 'account', 'note':
    Table(table, models, Column('id', Integer, primary_key=True))


def include_name(name, kind, parents):
    return kind not in ('schema', 'table') or not re.match('dlock(_|$)', name or '')


database, *how = sys.argv[1:]
options = {'include_schemas': 'schemas' in how}
if 'advised' in how:
    options['include_name'] = include_name
with create_engine(f'postgresql+psycopg2:///{database}').connect() as connection:
    context = MigrationContext.configure(connection, opts=options)
    for operation, subject, *_ in compare_metadata(context, models):
        print(operation, subject.name)
