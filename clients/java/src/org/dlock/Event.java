package org.dlock;

import java.util.HashMap;
import java.util.Map;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * A ticket was granted, wanted (a request waits for the lock), released (by force), expired or lost; or a watched lock
 * is held or free.  The details are those of the server's message.
 */
public record Event(String event, String lock, Long ticket, Map<String, String> details) {
    /** A member of the server's JSON, which is an object in ASCII whose values are strings, numbers and null */
    private static final Pattern MEMBER = Pattern.compile(
            "\"(\\w++)\"\\s*+:\\s*+(?:\"([^\"\\\\]*+(?:\\\\.[^\"\\\\]*+)*+)\"|([^\\s,}]++))");
    private static final Pattern ESCAPE = Pattern.compile("\\\\(?:u(\\p{XDigit}{4})|(.))");

    static Event of(String json) {
        Map<String, String> said = new HashMap<>();
        for (Matcher member = MEMBER.matcher(json); member.find(); )
            if (member.group(2) != null)
                said.put(member.group(1), unescape(member.group(2)));
            else if (!member.group(3).equals("null"))
                said.put(member.group(1), member.group(3));
        String ticket = said.remove("ticket");
        return new Event(said.remove("event"), said.remove("lock"), ticket == null ? null : Long.valueOf(ticket),
                Map.copyOf(said));
    }

    private static String unescape(String text) {
        return ESCAPE.matcher(text).replaceAll(found -> Matcher.quoteReplacement(found.group(1) != null
                ? String.valueOf((char) Integer.parseInt(found.group(1), 16))
                : switch (found.group(2)) {
                    case "b" -> "\b";
                    case "f" -> "\f";
                    case "n" -> "\n";
                    case "r" -> "\r";
                    case "t" -> "\t";
                    default -> found.group(2);
                }));
    }
}
