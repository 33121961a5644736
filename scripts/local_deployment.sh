#!/usr/bin/env bash
# A real deployment on this machine: one SuperLink and several SuperNodes as separate processes,
# with TLS and a key per node. The script submits one run, streams its log and then stops all
# processes. docs/deployment.md describes a deployment on several machines.
#
#   scripts/local_deployment.sh [--nodes 3] [--warm] [--keep] [--site name=path ...] [overrides ...]
#   scripts/local_deployment.sh method=scaffold 'plugin=[fednorm]' rounds=3
#
# --site starts a node with data of its own (dataset=local). Give it once for each site, instead of
# --nodes. --warm starts `python -m fedhet deploy node` instead of flower-supernode, for shorter
# rounds. --keep keeps the work folder: certificates, keys, logs, client states. Activate the Python
# environment first. The exit code is the status of the run: 0 success, 1 failure, 2 a wrong
# setting, 130 and 143 interrupted. If the run had a folder, the last line of stdout is
# "run folder: <absolute path>".
set -euo pipefail

START_SECONDS=120 # time for the SuperLink to start, and again for the nodes
END_SECONDS=15    # time for the processes to exit after SIGTERM; then they are killed
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
nodes=3 keep=false folder="" pids="" sites=() supernode=(flower-supernode)

die() { # die <exit code> <message>
  echo "error: $2" >&2
  exit "$1"
}

while (($#)); do
  case $1 in
    --nodes) nodes=${2:-}; shift ;;
    --site) sites+=("${2:-}"); shift ;;
    --keep) keep=true ;;
    --warm) supernode=(python -m fedhet deploy node --code any) ;;
    -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
    -*) die 2 "unknown option $1; allowed are --nodes, --site, --warm, --keep and --help" ;;
    *) break ;;
  esac
  shift || true
done
[[ $nodes =~ ^[1-9][0-9]*$ ]] || die 2 "--nodes '$nodes': a whole number of at least 1 is expected"
for site in ${sites[@]+"${sites[@]}"}; do # bash before 4.4 treats an empty array as unset
  [[ $site == *=* && -e ${site#*=} ]] ||
    die 2 "--site '$site': name=path is expected, with an existing file or folder of data"
done
if ((${#sites[@]})); then nodes=${#sites[@]}; fi
PATH=${VIRTUAL_ENV:+$VIRTUAL_ENV/bin:}$PATH # Flower starts its helpers by name
for tool in python flwr flower-superexec flower-supernode openssl ssh-keygen; do
  command -v "$tool" >/dev/null ||
    die 2 "$tool is not on PATH; activate the environment in which fedhet is installed"
done

# ---- at the end, or after an error, the script stops every process that it has started
launch() { # launch <command ...>: in the background, in a new process group
  set -m
  "$@" </dev/null &
  set +m
  pids+=" $!"
}

signal() { # signal <name> <process group ...>: succeeds if one of the groups still has a process
  local name=$1 group none_left=1
  shift
  for group; do kill -s "$name" -- "-$group" 2>/dev/null && none_left=0; done
  return $none_left
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
      ((deadline)) || die 1 "a process exited while waiting for $what; its log is above"
      die 1 "waited $START_SECONDS s for $what; the logs are above"
    fi
    sleep .5
  done
}

# ---- check the settings before any process is started; the server app needs an absolute run folder
# As for `python -m fedhet`, packages in FEDHET_TRUST may lie in the working directory.
if [[ ${FEDHET_TRUST:-} ]]; then export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD; fi
folder=$(PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} python - "$work/run.toml" "$*" <<'PY'
import json
import shlex
import sys
from pathlib import Path

from fedhet.runs import config
from fedhet.core.errors import ConfigError
from fedhet.runs.process import direct_loopback


def quoted(text):
    return json.dumps(text, ensure_ascii=False)


try:
    settings = config.compose(shlex.split(sys.argv[2]))
    run_dir = settings.run_dir
    if Path(run_dir, "summary.json").exists():
        raise ConfigError(f"hydra.run.dir={run_dir}: the folder already has a run; name another")
except (ConfigError, ValueError) as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
overrides = shlex.join([*settings.overrides, f"hydra.run.dir={quoted(run_dir)}"])
Path(sys.argv[1]).write_text(f"overrides = {quoted(overrides)}\n")
direct = (f"export {name}={shlex.quote(value)}\n" for name, value in direct_loopback().items())
Path(sys.argv[1]).with_name("loopback.sh").write_text("".join(direct))
print(run_dir)
PY
)
# shellcheck source=/dev/null
source "$work/loopback.sh" # connections to this machine must not use a proxy

# ---- a CA, the SuperLink's certificate (its SAN lists the names that nodes use), a key per node
(
  cd "$work"
  printf '%s\n' 'subjectAltName = DNS:localhost, IP:127.0.0.1' \
    'authorityKeyIdentifier = keyid' >server.ext
  openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj "/CN=local CA" \
    -addext "keyUsage=critical,keyCertSign,cRLSign" -keyout ca.key -out ca.crt
  openssl req -newkey rsa:2048 -nodes -subj "/CN=localhost" -keyout server.key -out server.csr
  openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 \
    -extfile server.ext -out server.pem
  for ((i = 0; i < nodes; i++)); do
    ssh-keygen -q -t ecdsa -b 384 -N "" -C "node$i" -f "node$i.key"
  done
) >"$work/keys.txt" 2>&1 || {
  cat "$work/keys.txt" >&2
  die 1 "the certificates could not be created"
}

# ---- the SuperLink
read -r -a ports <<<"$(python -c "import socket
held = [socket.create_server(('127.0.0.1', 0)) for _ in range($nodes + 1)]
print(*[each.getsockname()[1] for each in held])")"
superlink=127.0.0.1:${ports[nodes]}
export FLWR_HOME=$work # never the user's ~/.flwr
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
cat >"$work/config.toml" <<TOML
[superlink]
default = "deployment"
[superlink.deployment]
address = "$superlink"
root-certificates = "$work/ca.crt"
TOML
# However it is killed, it leaves no processes behind; flower-superlink may.
launch env PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" python -m fedhet deploy link . \
  --host 127.0.0.1 --port "${ports[nodes]}" \
  --enable-supernode-auth --disable-runtime-dependency-installation \
  --ssl-ca-certfile "$work/ca.crt" --ssl-certfile "$work/server.pem" \
  --ssl-keyfile "$work/server.key" >"$work/superlink.log" 2>&1
listening() { # listening <port ...>
  local port
  for port; do (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null || return; done
}
await "the SuperLink" listening "${ports[nodes]}"
pids+=" $(pgrep -P "$!")" # its superexec, which runs the server app, has its own process group

# ---- the nodes, each with its own home and state folder, as on separate machines
node() { # node <i>: its key must be registered before it starts
  flwr supernode register "$work/node$1.key.pub" deployment --name "node$1"
  local config="partition-id=$1 num-partitions=$nodes" site=${sites[$1]:-}
  if [[ $site ]]; then config="site=\"${site%%=*}\" data=\"$(realpath "${site#*=}")\""; fi
  export FLWR_HOME=$work/node$1 FEDHET_STATE_DIR=$work/node$1/state
  # Only `deploy node` uses this copy of fedhet; the clients' code comes with the run.
  if ((${#supernode[@]} > 1)); then export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}; fi
  exec "${supernode[@]}" --superlink "$superlink" --root-certificates "$work/ca.crt" \
    --auth-supernode-private-key "$work/node$1.key" --host 127.0.0.1 --port "${ports[$1]}" \
    --node-config "$config"
}
for ((i = 0; i < nodes; i++)); do launch node "$i" >"$work/node$i.log" 2>&1; done
online() {
  flwr supernode ls deployment --format json 2>&1 | python -c "import json, sys
nodes = json.load(sys.stdin)['nodes']
sys.exit(sum(node['status'] == 'online' for node in nodes) < $nodes)"
}
# Check the ports first, because Flower's command takes seconds of processor time.
await "$nodes SuperNodes to start" listening "${ports[@]::nodes}"
await "$nodes SuperNodes" online

# ---- the run. flwr run always exits with 0, so the script asks Flower for the status. The log can
# end a moment before the run.
launch flwr run "$root" deployment --stream --run-config "$work/run.toml" >&2
wait "$!" || die 1 "flwr run did not submit the run, or lost the SuperLink"
for ((i = 0; i < 20; i++)); do
  status=$(flwr ls deployment --format json | python -c "import json, sys
run = json.load(sys.stdin)['runs'][0]
print(run['status'], run['status-details'])")
  [[ $status != finished:* ]] || break
  sleep 1
done
[[ $status == finished:completed* ]] || die 1 "Flower reports $status"
