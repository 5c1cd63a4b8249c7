//! Options that mean nothing without another. Given on the command line, such a one is refused by name, and what it lacks is said.
//!
//! Of variables and of `forebay.toml` nothing is asked: they are standing, and hold where there is a use for them.

use std::collections::BTreeSet;

use clap::ArgMatches;
use clap::parser::ValueSource;

use crate::args::{
    BackendArg, Cli, Command, EvalCommand, LogArg, Options, ResidencyArg, RunArgs, SpeculateArg,
};
use crate::failure::usage;

/// Long names, with `_`, of what was given on the command line.
#[derive(Debug, Default)]
pub struct Given(BTreeSet<String>);

impl Given {
    /// Of the command that was chosen, however deep it is.
    pub fn of(matches: &ArgMatches) -> Given {
        if let Some((_, inner)) = matches.subcommand() {
            return Given::of(inner);
        }
        let told =
            |id: &&clap::Id| matches.value_source(id.as_str()) == Some(ValueSource::CommandLine);
        Given(matches.ids().filter(told).map(|id| id.as_str().to_owned()).collect())
    }
}

/// An option, whether nothing would come of it, and what to do.
type Rule = (&'static str, bool, &'static str);

/// Refuses the first option that was given for nothing.
pub fn check(cli: &Cli, given: &Given) -> anyhow::Result<()> {
    let shared = options_of(&cli.command).map_or(Vec::new(), |o| shared(o, &cli.command));
    let rules = shared.into_iter().chain(own(&cli.command));
    for (option, for_nothing, instead) in rules {
        if for_nothing && given.0.contains(option) {
            let option = option.replace('_', "-");
            return Err(usage(format!("--{option} does nothing here: {instead}")));
        }
    }
    Ok(())
}

fn options_of(command: &Command) -> Option<&Options> {
    Some(match command {
        Command::Run(a) => &a.model.options,
        Command::Serve(a) => &a.model.options,
        Command::Batch(a) => &a.model.options,
        Command::Inspect(a) => &a.model.options,
        Command::Plan(a) => &a.model.options,
        Command::Trace(a) => &a.options,
        Command::Bench(a) => &a.model.options,
        Command::Eval(e) => match &e.command {
            EvalCommand::Golden(a) => &a.model.options,
            EvalCommand::Perplexity(a) => &a.model.options,
            EvalCommand::Same(a) => &a.model.options,
        },
        Command::Pull(_)
        | Command::Template(_)
        | Command::Selftest(_)
        | Command::Tokenize(_)
        | Command::Parse(_) => return None,
    })
}

/// Options of every command that opens a model.
fn shared(o: &Options, command: &Command) -> Vec<Rule> {
    let nobody_drafts = match (o.speculate, &o.draft_model) {
        (None, None) => !drafts_unasked(command),
        (speculate, _) => speculate == Some(SpeculateArg::Off),
    };
    let drafter = "nothing drafts; give --speculate ngram, mtp, draft or dflash as well";
    let unstreamed = matches!(o.residency, ResidencyArg::Mapped | ResidencyArg::Resident);
    let streamed = "it is for streamed experts; give --residency stream, or leave it out";
    let drafts = !matches!(o.speculate, None | Some(SpeculateArg::Off));
    let (no_drafts, why) = match command {
        Command::Trace(_) => {
            (drafts, "what is taken back would be in the trace; leave it out, nothing drafts here")
        }
        Command::Eval(e) if !matches!(e.command, EvalCommand::Same(_)) => {
            (drafts, "logits of a given text are compared and nothing drafts; leave it out")
        }
        _ => (false, ""),
    };
    vec![
        ("speculate", no_drafts, why),
        ("draft_model", !why.is_empty(), why),
        ("draft_tokens", nobody_drafts, drafter),
        ("speculate_always", nobody_drafts, drafter),
        ("slots", unstreamed, streamed),
        ("policy", unstreamed, streamed),
        ("io_depth", unstreamed, streamed),
    ]
}

/// Whether a command has something draft where nothing is said of drafters.
fn drafts_unasked(command: &Command) -> bool {
    match command {
        Command::Bench(a) => a.scripted.is_some(),
        Command::Eval(e) => matches!(e.command, EvalCommand::Same(_)),
        _ => false,
    }
}

/// Options of one command.
fn own(command: &Command) -> Vec<Rule> {
    match command {
        Command::Run(a) => run(a),
        Command::Serve(a) => vec![(
            "log_prompts",
            a.log_format == LogArg::Off,
            "nothing is logged; leave --log-format off out",
        )],
        Command::Trace(a) => vec![(
            "backend",
            a.options.backend == BackendArg::Cuda,
            "on a GPU choices of experts are not read back; leave it out",
        )],
        Command::Bench(a) => {
            let scripted = a.scripted.is_some();
            let speculate = a.model.options.speculate;
            let why = "--scripted drafts itself; leave one of both out";
            let other = !matches!(speculate, None | Some(SpeculateArg::Mtp));
            vec![("speculate", scripted && other, why), ("draft_model", scripted, why)]
        }
        Command::Tokenize(a) => {
            vec![(
                "special",
                a.decode,
                "it is for texts, --decode takes ids; leave one of both out",
            )]
        }
        _ => Vec::new(),
    }
}

fn run(a: &RunArgs) -> Vec<Rule> {
    let s = &a.sampling;
    let unpenalised = s.temp == Some(0.0)
        && s.repeat_penalty.is_none_or(|p| p == 1.0)
        && s.presence_penalty == 0.0
        && s.frequency_penalty == 0.0;
    let alone = "it is for one answer, and this is a chat; give a prompt";
    vec![
        (
            "repeat_last_n",
            unpenalised,
            "with --temp 0 nothing is penalised; give --repeat-penalty, --presence-penalty or \
             --frequency-penalty as well",
        ),
        ("ignore_eos", a.is_chat(), alone),
        ("stats", a.is_chat(), "this is a chat, where /stats says it; give a prompt"),
    ]
}
