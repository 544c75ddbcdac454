// How drizzle-kit is to treat a database; test/t/client_schema_tools.pl says by
// the environment which, and with which filters.
import { defineConfig } from 'drizzle-kit';

export default defineConfig({
	dialect: 'postgresql',
	schema: './schema.ts',
	dbCredentials: {
		host: process.env.PGHOST!,
		port: Number(process.env.PGPORT),
		user: process.env.PGUSER!,
		database: process.env.PGDATABASE!,
		ssl: false,
	},
	...JSON.parse(process.env.FILTERS!),
});
