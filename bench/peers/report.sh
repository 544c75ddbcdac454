# shellcheck shell=bash
# shellcheck disable=SC2034,SC2119,SC2120,SC2154 # shared with other scripts
#
# Print and store the results of bench/peers/run.

columns='%-16s %7s  %-13s %-9s %10s %10s %8s'

# progress TEXT...: show progress in one line, on a terminal only
progress()
{
	if [ -t 2 ]; then
		printf '\r\033[K%s' "${*:+$((SECONDS / 60)) min: $*}" >&2
	fi
}

# sample SCENARIO CLIENTS PEER UNIT DLOCK PEER'S RATIO: the result of one run
sample()
{
	progress
	# shellcheck disable=SC2059
	printf "$columns\n" "${@//_/ }"
	(IFS=, && printf '%s\n' "$*") >>"$samples"
}

# sample_time SCENARIO CLIENTS PEER UNIT DLOCK PEER'S: less is better
sample_time()
{
	sample "$@" "$(divide "$6" "$5")"
}

# sample_rate SCENARIO CLIENTS PEER UNIT DLOCK PEER'S: more is better
sample_rate()
{
	sample "$@" "$(divide "$5" "$6")"
}

# divide A B: prints the quotient, at most 9999, for example if B is 0
divide()
{
	awk -v a="$1" -v b="$2" 'BEGIN {
		printf "%.4f", (a < 9999 * b) ? a / b : (a > 0) ? 9999 : 1
	}'
}

# compute_turns LENGTH REFERENCE'S-FILE FILE...: read the answers of drivers.
# Prints for each file, including the reference,
#	FILE, rate, median of the rounds' ratios, p50, p99 of the waits in
#	microseconds, slowest client's share of the fastest one's, number of late
compute_turns()
{
	awk -v length_ms="$1" '
		function median(list, n,  i, j, x)
		{
			for (i = 2; i <= n; i++) {
				x = list[i]
				for (j = i - 1; j >= 1 && list[j] > x; j--)
					list[j + 1] = list[j]
				list[j + 1] = x
			}
			return n % 2 ? list[(n + 1) / 2] : (list[n / 2] + list[n / 2 + 1]) / 2
		}
		# the middle of its bucket
		function percentile(file, p,  bucket, sum)
		{
			for (bucket = 0; bucket < 1200; bucket++) {
				sum += waits[file, bucket]
				if (sum > 0 && sum >= p * waited[file])
					return exp((bucket + 0.5) / 50)
			}
			return 0
		}
		FNR == 1 { name[++files] = FILENAME }
		$1 == "round" { count[files, $2] = $3; done[files] += $3; rounds = $2 + 1 }
		$1 == "wait" { waits[files, $2] = $3; waited[files] += $3 }
		$1 == "client" {
			if ($2 == 0 || $3 < least[files])
				least[files] = $3
			if ($3 > most[files])
				most[files] = $3
		}
		$1 == "late" { late[files] = $2 }
		END {
			for (f = 1; f <= files; f++) {
				for (r = n = 0; r < rounds; r++)
					if (count[f, r] || count[1, r])
						ratio[++n] = count[f, r] ? count[1, r] / count[f, r] : 9999
				printf "%s %.1f %.4f %.0f %.0f %.4f %d\n", name[f],
					done[f] / (rounds * length_ms * 0.6e-3),
					n ? median(ratio, n) : 1, percentile(f, 0.5),
					percentile(f, 0.99),
					most[f] ? least[f] / most[f] : 0, late[f]
			}
		}' "${@:2}"
}

# summarize SAMPLES: prints CSV, in the order of the samples.  The verdict is
# "peer ahead" if the peer was ahead in every run, "even" if in some.
summarize()
{
	printf 'scenario,clients,peer,unit,dlock,peer_value,ratio,least,greatest,verdict\n'
	awk -F , '
		function sorted(key, field,  i, j, x)
		{
			for (i = 1; i <= n[key]; i++) {
				x = value[key, i, field]
				for (j = i - 1; j >= 1 && list[j] > x; j--)
					list[j + 1] = list[j]
				list[j + 1] = x
			}
		}
		function median(key, field,  c)
		{
			sorted(key, field)
			c = n[key]
			return c % 2 ? list[(c + 1) / 2] : (list[c / 2] + list[c / 2 + 1]) / 2
		}
		NR > 1 {
			key = $1 "," $2 "," $3 "," $4
			if (!n[key]++)
				order[++keys] = key
			for (f = 5; f <= 7; f++)
				value[key, n[key], f] = $f + 0
		}
		END {
			for (i = 1; i <= keys; i++) {
				key = order[i]
				dlock = median(key, 5)
				peer = median(key, 6)
				ratio = median(key, 7)
				printf "%s,%.10g,%.10g,%.3f,%.3f,%.3f,%s\n", key, dlock, peer,
					ratio, list[1], list[n[key]],
					list[n[key]] < 1 ? "peer ahead" : list[1] < 1 ? "even" : ""
			}
		}' "$1"
}

# print_summary SUMMARY
print_summary()
{
	printf '\nSummary: medians of the runs; a ratio above 1 is in favor of dlock\n\n'
	# shellcheck disable=SC2059
	printf "$columns\n" scenario clients peer unit dlock peer \
		'ratio (least .. greatest)'
	awk -F , 'NR > 1 {
		gsub("_", " ")
		printf "%-16s %7s  %-13s %-9s %10.10g %10.10g %8.3f (%.3f .. %.3f)%s\n",
			$1, $2, $3, $4, $5, $6, $7, $8, $9, $10 ? "  " $10 : ""
	}' "$1"
}
