package org.dlock;

/**
 * Executes a SELECT in the program's own transaction, and returns its value: one row, one column.
 *
 * <p>The statement has a ? for each value; the values are strings and numbers.  With JdbcTemplate:
 * <code>(sql, values) -&gt; jdbc.queryForObject(sql, Long.class, values)</code>.
 */
@FunctionalInterface
public interface Sql {
    Object value(String sql, Object... values) throws Exception;
}
