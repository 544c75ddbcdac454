// What the application wants to have: a table that is there, and, if NOTE is
// set, one that is not
import { integer, pgTable } from 'drizzle-orm/pg-core';

export const account = pgTable('account', { id: integer('id').primaryKey() });
export const note = process.env.NOTE
	? pgTable('note', { id: integer('id').primaryKey() })
	: undefined;
