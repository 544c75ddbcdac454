#!/usr/bin/env python3
"""Booking seats, with versions through an ORM

Shows: optimistic locking with SQLAlchemy's version column while a user takes
time to decide, and a trigger of dlock that also counts the changes made by
other programs.

    python3 booking.py setup            # once: the table with two seats
    python3 booking.py 7A alice         # asks alice, and reads the answer

No row is locked while the user decides, so an instance that hangs or dies
delays no other.  If another program changes the seat before the user answers,
this program shows the seat again instead of overwriting it.

PGHOST and so on name the server.  Needs SQLAlchemy 1.4 or 2.0, and psycopg2.
"""

import sys

from sqlalchemy import Column, Integer, Text, create_engine, text
from sqlalchemy.orm import declarative_base, sessionmaker
from sqlalchemy.orm.exc import StaleDataError

SETUP = """
    CREATE TABLE seat (number text PRIMARY KEY, passenger text,
                       version integer NOT NULL DEFAULT 1);
    CREATE TRIGGER versioned BEFORE UPDATE ON seat
        FOR EACH ROW EXECUTE FUNCTION dlock_version_guard('version');
    INSERT INTO seat (number) VALUES ('7A'), ('7B')
"""

Base = declarative_base()
engine = create_engine('postgresql+psycopg2://', future=True)
# After a commit, objects keep the values that were read.
Session = sessionmaker(engine, future=True, expire_on_commit=False)


class Seat(Base):
    __tablename__ = 'seat'
    number = Column(Text, primary_key=True)
    passenger = Column(Text)
    version = Column(Integer, nullable=False)
    __mapper_args__ = {'version_id_col': version}


def book(number, passenger):
    """Returns True if the passenger has the seat."""
    while True:
        with Session() as session:
            seat = session.get(Seat, number)
        if seat.passenger is not None:
            print(f'{number} is taken by {seat.passenger}', flush=True)
            return False
        print(f'{number} is free: yes?', flush=True)
        if sys.stdin.readline().strip() != 'yes':
            print('not booked', flush=True)
            return False
        try:
            with Session.begin() as session:
                session.add(seat)       # with the version seen by the user
                seat.passenger = passenger
        except StaleDataError:
            print(f'{number} has changed', flush=True)
            continue
        print('booked', flush=True)
        return True


if __name__ == '__main__':
    if sys.argv[1:] == ['setup']:
        with engine.begin() as connection:
            connection.execute(text(SETUP))
    elif len(sys.argv) == 3:
        sys.exit(0 if book(*sys.argv[1:]) else 1)
    else:
        sys.exit(__doc__)
