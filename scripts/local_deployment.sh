#!/usr/bin/env bash
# A real deployment on this machine: one SuperLink and some SuperNodes as processes of their own, with TLS and a key
# per node. Submits one run to them, streams its log and ends them all. docs/deployment.md does it on real machines.
#
#   scripts/local_deployment.sh [--nodes 3] [--keep] [overrides ...]
#   scripts/local_deployment.sh method=scaffold 'plugin=[fednorm]' rounds=3
#
# --keep keeps the work folder: certificates, keys, logs, client state. The Python environment must be active.
# Exit code, how the run truly ended: 0 well, 1 not well, 2 a wrong setting, 130 and 143 interrupted.
# The last line of stdout is "run folder: <absolute path>", where the run got as far as having one.
set -euo pipefail

START_SECONDS=120 # for the SuperLink, and then for the nodes, to be up
END_SECONDS=15    # for the processes to end by themselves before they are killed
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
nodes=3 keep=false folder="" pids=""

die() { # die <exit code> <message>
  echo "error: $2" >&2
  exit "$1"
}

while (($#)); do
  case $1 in
    --nodes) nodes=${2:-}; shift ;;
    --keep) keep=true ;;
    -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
    -*) die 2 "unknown option $1; allowed are --nodes, --keep and --help" ;;
    *) break ;;
  esac
  shift || true
done
[[ $nodes =~ ^[1-9][0-9]*$ ]] || die 2 "--nodes '$nodes': a whole number of at least 1 is expected"
PATH=${VIRTUAL_ENV:+$VIRTUAL_ENV/bin:}$PATH # Flower starts its helpers by name
for tool in python flwr flower-superlink flower-supernode openssl ssh-keygen; do
  command -v "$tool" >/dev/null || die 2 "$tool is not on PATH; activate the environment in which fedhet is installed"
done

# ---- whatever happens, every process that was started is ended
launch() { # launch <command ...>: in the background, in a process group of its own
  set -m
  "$@" </dev/null &
  set +m
  pids+=" $!"
}

signal() { # signal <name> <process group ...>: true where one of the groups still has a process
  local name=$1 group found=1
  shift
  for group; do kill -s "$name" -- "-$group" 2>/dev/null && found=0; done
  return $found
}

finish() {
  local code=$? deadline=$((SECONDS + END_SECONDS))
  trap '' HUP INT TERM
  # shellcheck disable=SC2086 # a list of numbers
  if signal TERM $pids; then
    while signal 0 $pids && ((SECONDS < deadline)); do sleep .2; done
    signal KILL $pids || true
  fi
  if $keep; then echo "work folder: $work" >&2; else rm -rf "$work"; fi
  if [[ -d $folder ]]; then echo "run folder: $folder"; fi
  exit "$code"
}
work=$(mktemp -d "${TMPDIR:-/tmp}/fedhet-deployment.XXXXXX")
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

await() { # await <what> <command ...>: until the command succeeds
  local what=$1 pid deadline=$((SECONDS + START_SECONDS))
  shift
  until "$@"; do
    for pid in $pids; do kill -0 "$pid" 2>/dev/null || deadline=0; done
    if ((SECONDS >= deadline)); then
      tail -n 15 "$work"/*.log >&2
      ((deadline)) || die 1 "waiting for $what, a process has ended; its log is above"
      die 1 "waited $START_SECONDS s for $what; the logs are above"
    fi
    sleep .5
  done
}

# ---- the settings, checked before anything is started; the server app needs an absolute run folder
folder=$(PYTHONPATH=$root python - "$work/run.toml" "$*" <<'PY'
import json
import shlex
import sys
from pathlib import Path

from fedhet import config
from fedhet.errors import ConfigError

try:
    settings = config.compose(shlex.split(sys.argv[2]))
    if Path(settings.run_dir, "summary.json").exists():
        raise ConfigError(f"hydra.run.dir={settings.run_dir}: that folder already holds a run; name another")
except (ConfigError, ValueError) as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
overrides = [*settings.overrides, f"hydra.run.dir={json.dumps(settings.run_dir, ensure_ascii=False)}"]
Path(sys.argv[1]).write_text(f"overrides = {json.dumps(shlex.join(overrides), ensure_ascii=False)}\n")
print(settings.run_dir)
PY
)

# ---- a CA, the SuperLink's certificate (its SAN holds the names by which it is reached), a key per node
(
  cd "$work"
  printf 'subjectAltName = DNS:localhost, IP:127.0.0.1\nauthorityKeyIdentifier = keyid\n' >server.ext
  openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj "/CN=local CA" -addext "keyUsage=critical,keyCertSign,cRLSign" \
    -keyout ca.key -out ca.crt
  openssl req -newkey rsa:2048 -nodes -subj "/CN=localhost" -keyout server.key -out server.csr
  openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -extfile server.ext -out server.pem
  for ((i = 0; i < nodes; i++)); do ssh-keygen -q -t ecdsa -b 384 -N "" -C "node$i" -f "node$i.key"; done
) >"$work/keys.txt" 2>&1 || { cat "$work/keys.txt" >&2; die 1 "the certificates could not be made"; }

# ---- the SuperLink
read -r -a ports <<<"$(python -c "import socket
held = [socket.create_server(('127.0.0.1', 0)) for _ in range($nodes + 1)]
print(*[each.getsockname()[1] for each in held])")"
superlink=127.0.0.1:${ports[nodes]}
export FLWR_HOME=$work FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 # never the user's ~/.flwr
cat >"$work/config.toml" <<TOML
[superlink]
default = "deployment"
[superlink.deployment]
address = "$superlink"
root-certificates = "$work/ca.crt"
TOML
launch flower-superlink --host 127.0.0.1 --port "${ports[nodes]}" --enable-supernode-auth --disable-runtime-dependency-installation \
  --ssl-ca-certfile "$work/ca.crt" --ssl-certfile "$work/server.pem" --ssl-keyfile "$work/server.key" >"$work/superlink.log" 2>&1
listening() { # listening <port ...>
  local port
  for port; do (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null || return; done
}
await "the SuperLink" listening "${ports[nodes]}"
pids+=" $(pgrep -P "$!")" # its superexec, and with it the server app, has a process group of its own

# ---- the nodes, each with a home and a state folder of its own, as on a machine of its own
node() { # node <i>: its key must be known before it starts
  flwr supernode register "$work/node$1.key.pub" deployment --name "node$1"
  export FLWR_HOME=$work/node$1 FEDHET_STATE_DIR=$work/node$1/state
  exec flower-supernode --superlink "$superlink" --root-certificates "$work/ca.crt" --auth-supernode-private-key "$work/node$1.key" \
    --host 127.0.0.1 --port "${ports[$1]}" --node-config "partition-id=$1 num-partitions=$nodes"
}
for ((i = 0; i < nodes; i++)); do launch node "$i" >"$work/node$i.log" 2>&1; done
online() {
  flwr supernode ls deployment --format json 2>&1 | python -c \
    "import json, sys; sys.exit(sum(node['status'] == 'online' for node in json.load(sys.stdin)['nodes']) < $nodes)"
}
await "$nodes SuperNodes to start" listening "${ports[@]::nodes}" # cheaper to ask than Flower, whose command takes seconds of work
await "$nodes SuperNodes" online

# ---- the run. flwr run ends with 0 whatever became of it, so Flower is asked; the log can end a moment before the run
launch flwr run "$root" deployment --stream --run-config "$work/run.toml" >&2
wait "$!" || die 1 "flwr run did not submit the run, or lost the SuperLink"
for ((i = 0; i < 20; i++)); do
  found=$(flwr ls deployment --format json | python -c "import json, sys
run = json.load(sys.stdin)['runs'][0]
print(run['status'], run['status-details'])")
  [[ $found != finished:* ]] || break
  sleep 1
done
[[ $found == finished:completed* ]] || die 1 "Flower says $found"
