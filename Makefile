# `make demo` and `make test` build what they need; everything else assumes one of their environments.
# The environment that lint and docs use; `make lint RUN=` uses the one you are in.
RUN ?= .ci/with 3.11
KILLS = $(addprefix tests/,checkpoints/test_whole.py evaluation/test_command.py evaluation/test_served.py \
  synthesize/test_resume.py training/test_kill.py)
.PHONY: help demo demo-trl environments test test-fast test-3.11 test-3.12 test-trl fuzz lint docs dist clean

help:            ## list the targets
	@grep -E '^[a-z.0-9 -]+:.*##' Makefile | sed 's/:[^#]*##/ -/'

demo:            ## extend a tiny model's window 16 times through Axolotl, show the table and the picture
	.ci/with any python example_configs/quickstart/run.py

demo-trl:        ## the same model through TRL's SFTTrainer
	.ci/with any python example_configs/trl/sft.py --evaluate

environments:    ## build all environments at once; one that fails is built again, and reported, by what needs it
	@for name in 3.11 3.12 trl; do .ci/environment $$name > /dev/null & done; wait

test: environments lint  ## every test in every environment: Axolotl 0.19, Axolotl 0.21, and TRL alone
	.ci/test 3.11
	.ci/test 3.12
	.ci/test trl

test-fast:       ## the quick tests in the environment you are in (pip install -e ".[dev]"); about a minute
	OMP_NUM_THREADS=1 python -m pytest -n 2 -m "not integration and not distributed and not docs and not real_model and not slow"

test-3.11 test-3.12 test-trl:
	.ci/test $(@:test-%=%)

fuzz:            ## a long search: random inputs, and kills of every command that writes; an hour or two
	POSE_FUZZ_EXAMPLES=20000 .ci/with 3.11 python -m pytest -q tests/fuzz
	POSE_KILLS=30 .ci/with 3.11 python -m pytest -q -k kill $(KILLS)

lint:            ## ruff and mypy
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

docs:            ## build the site into site/
	$(RUN) pip install -q -e ".[docs]"
	$(RUN) mkdocs build --strict --config-file .ci/mkdocs.yml

dist:            ## build the wheel and the sdist into dist/, check them, install them in clean environments
	.ci/dist $(EXTRAS)

clean:           ## remove environments and outputs
	rm -rf .venv-* outputs build dist site
