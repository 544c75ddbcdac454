# Completion of dlock for bash
_dlock()
{
	local cur=${COMP_WORDS[COMP_CWORD]} word sub='' names=0 words=''
	local common='--host --port --username --dbname --password --quiet --verbose --help'

	for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
		case $word in
			run | top | ls | blockers | stats | watch | release | close)
				sub=${sub:-$word} ;;
			-*) ;;
			*) if [ -n "$sub" ]; then names=$((names + 1)); fi ;;
		esac
	done
	case $sub in
		'') words="run top ls blockers stats watch release close $common --version" ;;
		run) words="$common --nonblock --wait --conflict-exit-code --patience --shared
			--slots --permits --ttl --session --at-least --owner --info --every --grace" ;;
		top) words="$common --filter --interval --once" ;;
		ls | blockers | stats) words="$common --json --csv" ;;
		watch) words="$common --json" ;;
		*) words="$common --force" ;;
	esac
	# a command follows the name of the lock
	if [ "$sub" = run ] && [ "$names" -gt 0 ] && [[ $cur != -* ]]; then
		mapfile -t COMPREPLY < <(compgen -c -f -- "$cur")
	else
		mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
	fi
}
complete -F _dlock dlock
