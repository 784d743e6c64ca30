# The commands of this repository. `make` or `make help` lists them.

GO ?= go
# A pipe fails if any part of it does.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
# Every module: the root and those nested below it.
MODULES := $(sort $(dir $(shell find . -name go.mod -not -path './.git/*')))
# The other modules, those that take longest first. Most of the time their tests wait for servers, which they
# start themselves.
LONGEST := ./examples/service/ ./faults/ ./bench/peers/
OTHERS := $(LONGEST) $(filter-out ./ $(LONGEST),$(MODULES))
# As in .ci/race.
RACE := -race '-gcflags=github.com/yuin/gopher-lua/...=-race=false'
# Tests of internal/sim that run one world after the other.
WORLDS := ^Test(AmnesiaOfAMajority|ClocksThatJumpAhead|TokensOfANodeThatForgot|SeedsThatFailed)
# Packages of the root module whose tests have deadlines on real servers, which a busy machine misses.
DEADLINES := flightlock$$|/(fenced|lua|internal/(check|e2e|node|pubsub|quorum|redistest))$$

.DEFAULT_GOAL := help
.PHONY: help test test-long format vet lint race worlds sim long valkey soak platforms mutations fuzz forget
.PHONY: model fleet bench compare demo service faults paused picture

help: ## list the targets, with their times on 2 cores and a warm build cache
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

test: format vet lint race worlds sim ## 6 min: format, vet, lint, every package with the race detector, the models, the simulation
	@if command -v redis-server >/dev/null; then \
	  echo "make test: all tests ran, on $$(redis-server --version | cut -d' ' -f1-3)$$(command -v golangci-lint >/dev/null || echo '; not linted')"; \
	else \
	  echo "****************************************************************"; \
	  echo "make test: redis-server is not on this machine, so NOTHING was"; \
	  echo "tested on real servers: no restarts, no stopped nodes, no"; \
	  echo "Cluster, no proxy faults. Install it and run this again."; \
	  echo "****************************************************************"; \
	fi

test-long: valkey soak platforms ## 9 min: what test leaves out: on Valkey, network faults, more seeds, some mutants, other systems

format:
	@out=$$(gofmt -l .); if [ -n "$$out" ]; then echo "not gofmt'ed:"; echo "$$out"; exit 1; fi

vet:
	@for m in $(MODULES); do (cd $$m && $(GO) vet ./...) || exit 1; done

lint:
	@if command -v golangci-lint >/dev/null; then \
	  for m in $(MODULES); do (cd $$m && golangci-lint run ./...) || exit 1; done; \
	else echo "golangci-lint is not installed: not linted"; fi

# Everything is compiled first. What has no deadlines on real servers runs side by side: packages of
# the root module, and the other modules, which mostly wait for servers of their own. The packages with
# deadlines come two at a time, and internal/e2e, which keeps a machine busy by itself, alone. A process
# with the race detector sleeps before it exits, a second unless it is told otherwise. What it makes ten times slower,
# and has nothing to find in, is left to worlds.
race: export GORACE = atexit_sleep_ms=50
race:
	@for m in $(MODULES); do (cd $$m && $(GO) list $(RACE) -test -deps -export ./... >/dev/null) || exit 1; done
	@$(CURDIR)/.ci/race -timeout 10m -skip '$(WORLDS)' -- $$($(GO) list ./... | grep -vE '$(DEADLINES)|/docs/model$$') & \
	printf '%s\n' $(OTHERS) | xargs -P 2 -I{} sh -c 'cd {} && $(CURDIR)/.ci/race -p 1 -timeout 10m -- ./...'; \
	others=$$?; wait $$! && exit $$others
	@$(CURDIR)/.ci/race -p 2 -parallel 4 -timeout 10m -- $$($(GO) list ./... | grep -E '$(DEADLINES)' | grep -v /e2e$$)
	@$(CURDIR)/.ci/race -parallel 4 -timeout 10m -- ./internal/e2e

# What race leaves out.
worlds:
	@$(GO) test -count=1 -timeout 10m ./docs/model ./internal/sim

# Without the race detector, which makes it ten times slower; the race target has a few seeds with it.
# A world needs one core, and has half of the seeds.
sim: ## 15 s: the simulation: SEEDS worlds (default 200) from the FIRST (default 1)
	@first=$${FIRST:-1}; seeds=$${SEEDS:-200}; half=$$((seeds / 2)); \
	run() { $(GO) test ./internal/sim -count=1 -run '^TestSim$$' -v -timeout 24h -first $$1 -seeds $$2; }; \
	if [ $$half = 0 ]; then run $$first $$seeds; exit; fi; \
	run $$first $$half & run $$((first + half)) $$((seeds - half)); second=$$?; wait $$! && exit $$second

# Services in full: thousands of keys, busy processors, outages, deploys. Without the race detector, and
# nearly all of it one test at a time: what is measured is a service, its servers and nothing else. Not part of
# test-long, because some of it has limits that only a machine with nothing else to do keeps.
long: ## 10 min: services under load in full: thousands of keys, busy processors, outages, deploys
	FLIGHTLOCK_LONG=1 $(GO) test -count=1 -parallel 4 -timeout 60m -v ./internal/e2e

# What talks to real servers once more, on Valkey instead of Redis, without the race detector, as race does it. 4 min
valkey: export FLIGHTLOCK_REDIS_SERVER = valkey-server
valkey: export FLIGHTLOCK_REQUIRE_REDIS = 1
valkey:
	$(GO) test -count=1 -p 2 -parallel 4 -timeout 10m $$($(GO) list ./... | grep -E '$(DEADLINES)' | grep -v /e2e$$)
	$(GO) test -count=1 -parallel 4 -timeout 10m ./internal/e2e
	cd faults && $(GO) test -count=1 -timeout 5m ./...

# The root module, and what else compiles there without modules that only other systems need. 1 min, or 5 if
# nothing was compiled for them before
platforms:
	@for os in darwin windows; do for m in . faults docs/check; do \
	  (cd $$m && GOOS=$$os CGO_ENABLED=0 $(GO) vet ./...) || exit 1; done; done
	@cd bench/peers && GOOS=darwin CGO_ENABLED=0 $(GO) vet ./...

# More of what is random, all faults, the mutants that the simulation must notice, and what the race detector makes too
# slow. 4 min
soak:
	$(GO) test -count=1 -timeout 10m ./internal/flight ./rediscache
	$(GO) run ./internal/mutants -sim
	SEEDS=700 FIRST=201 $(MAKE) --no-print-directory sim
	cd examples/service && FLIGHTLOCK_LONG=1 $(GO) test -count=1 -run InShort . & \
	(cd faults && FLIGHTLOCK_LONG=1 $(GO) test -count=1 -timeout 10m ./...); faults=$$?; wait $$! && exit $$faults

# It continues where it was stopped, and leaves out what has not changed since; FRESH=1: nothing. ONLY=regexp: these
# mutants. ALL=1: the tests of all packages, not only up to the first in which one fails; that takes hours.
mutations: ## 1 h: break each rule, one at a time, and write which tests notice: internal/mutants/killed.tsv
	@$(GO) run ./internal/mutants $(if $(ALL),-all) $(if $(FRESH),-fresh) $(if $(ONLY),-only '$(ONLY)')

fleet: ## 10 min: processes that cache, on real servers, all of which are stopped and killed: no stale value (FOR=5m each mode)
	FLIGHTLOCK_REQUIRE_REDIS=1 $(GO) test ./rediscache -count=1 -run '^TestFleet$$' -v -fleet $${FOR:-5m} -timeout 60m

model: ## 6 min: models of turns, grants and retained leases, by chance and (with spin and gcc) exhaustive: each rule taken out in turn
	$(GO) run ./docs/model -worlds $${WORLDS:-500}

bench: ## 20 min: go test -bench, as for tuning
	$(GO) test -run '^$$' -bench . -benchmem -timeout 30m ./bench

compare: ## 1 h, with QUICK=1 5 min: flightlock and its rivals side by side
	cd bench/peers && $(GO) run . $(if $(QUICK),-quick -out quick,-readme ../../README.md)

demo: ## 15 s: the main job on embedded nodes
	$(GO) run ./bench

service: ## 5 min: the example service under load and faults, beside singleflight and redsync: a table
	$(GO) run -C examples/service . -demo $(if $(ONLY),-only "$(ONLY)")

faults: ## 5 min: break real servers and networks under several processes; DURATION=30m, ONLY=SIGSTOP
	cd faults && $(GO) run . $(if $(DURATION),-duration $(DURATION)) $(if $(ONLY),-only "$(ONLY)")

# The paused-holder test: updates that are lost without the token, and with it. 1 min
paused:
	cd faults && $(GO) run . -paused 60s

# Most of it is for what is refused or cut off while a node is asked what it remembers.
forget: ## 15 min: the tests of nodes that lose locks, TRIES times each (default 250)
	FLIGHTLOCK_TRIES=$${TRIES:-250} $(GO) test -count=1 -run 'NoSecondGrant' -v -timeout 60m .

fuzz: ## 10 min: each fuzz target for FUZZTIME (default 30s)
	@for p in $$($(GO) list ./...); do \
	  for f in $$($(GO) test -list '^Fuzz' $$p | grep '^Fuzz'); do \
	    $(GO) test -run '^$$' -fuzz "^$$f\$$" -fuzztime $${FUZZTIME:-30s} $$p || exit 1; done; done

picture: ## 2 min: the dashboard of docs/metrics.md, from a run; needs redis-server
	cd docs/check && $(GO) run ./picture
