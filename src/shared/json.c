/*-------------------------------------------------------------------------
 *
 * json.c
 *	  Texts of any encoding as JSON in ASCII.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/namespace.h"
#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"
#include "utils/json.h"

#include "shared/inner.h"

/* Convert to UTF-8, with "?" for each character that has no equivalent. */
static char *
replace_unknown(char *text)
{
	int			encoding = GetDatabaseEncoding();
	Oid			conversion = FindDefaultConversionProc(encoding, PG_UTF8);
	unsigned char *next = (unsigned char *) text;
	int			left = (int) strlen(text);
	int			size = left * MAX_CONVERSION_GROWTH + 1;
	unsigned char *piece = palloc(size);
	StringInfoData result;

	initStringInfo(&result);
	while (left > 0)
	{
		int			done = 0;

		piece[0] = '\0';
		if (OidIsValid(conversion))
			done = pg_do_encoding_conversion_buf(conversion, encoding, PG_UTF8,
												 next, left, piece, size, true);
		appendStringInfoString(&result, (char *) piece);
		next += done;
		left -= done;
		if (left > 0)
		{
			int			length = Min(pg_mblen((char *) next), left);

			appendStringInfoChar(&result, '?');
			next += length;
			left -= length;
		}
	}
	return result.data;
}

/*
 * Quote a text as a JSON string in ASCII.  In SQL_ASCII, each byte is one
 * character.  Unless "replace" is set, a failed conversion raises an error.
 */
char *
dlock_json_text(const char *text, int length, bool replace)
{
	char	   *utf8 = pnstrdup(text, length);
	bool		unknown = GetDatabaseEncoding() == PG_SQL_ASCII;
	StringInfoData quoted;
	StringInfoData result;
	const unsigned char *p;
	const unsigned char *end;

	if (!unknown && GetDatabaseEncoding() != PG_UTF8 && replace)
		utf8 = replace_unknown(utf8);
	else if (!unknown)
		utf8 = pg_server_to_any(utf8, (int) strlen(utf8), PG_UTF8);
	initStringInfo(&quoted);
	initStringInfo(&result);
	escape_json(&quoted, utf8);
	p = (const unsigned char *) quoted.data;
	end = p + quoted.len;
	while (p < end)
	{
		int			size;
		pg_wchar	c;

		if (*p < 0x80)
		{
			appendStringInfoChar(&result, (char) *p++);
			continue;
		}
		size = unknown ? 1 : pg_utf_mblen(p);
		if (!unknown && (size > end - p || !pg_utf8_islegal(p, size)))
		{
			/* calls refuse such a text, but a table can have one */
			appendStringInfoChar(&result, '?');
			p++;
			continue;
		}
		c = unknown ? *p : utf8_to_unicode(p);
		if (c >= 0x10000)
			appendStringInfo(&result, "\\u%04x\\u%04x",
							 0xd800 + ((c - 0x10000) >> 10),
							 0xdc00 + ((c - 0x10000) & 0x3ff));
		else
			appendStringInfo(&result, "\\u%04x", c);
		p += size;
	}
	return result.data;
}
