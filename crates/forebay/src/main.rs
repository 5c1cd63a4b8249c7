//! The `forebay` command: parse, choose a command, run it, turn its error into an exit code.
//!
//! Exit codes: 0 done, 1 failed, 2 wrong usage, 3 refused, 130 interrupted. Programs read one JSON
//! document or JSON lines on stdout (`--json`); progress, notes and errors go to stderr.

#![forbid(unsafe_code)]

mod args;
mod cmd;
mod config;
mod failure;
mod hub;
mod measure;
mod model;
mod odd;
mod partners;
mod profile;
mod taps;
mod term;
mod warm;

use std::process::ExitCode;

use args::{Command, EvalCommand};

fn main() -> ExitCode {
    let cli = match config::parse() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let json = cli.json();
    let result = match cli.command {
        Command::Run(a) => cmd::run::run(a),
        Command::Inspect(a) => cmd::inspect::run(a),
        Command::Plan(a) => cmd::plan::run(a),
        Command::Trace(a) => cmd::trace::run(a),
        Command::Pull(a) => cmd::pull::run(a),
        Command::Bench(a) => cmd::bench::run(a),
        Command::Eval(e) => match e.command {
            EvalCommand::Golden(a) => cmd::golden::run(a),
            EvalCommand::Perplexity(a) => cmd::perplexity::run(a),
            EvalCommand::Same(a) => cmd::same::run(a),
        },
        Command::Template(a) => cmd::template::run(a),
        Command::Selftest(a) => cmd::selftest::run(a),
        Command::Tokenize(a) => cmd::tokenize::run(a),
        Command::Parse(a) => cmd::parse::run(a),
        Command::Serve(a) => cmd::serve::run(a),
        Command::Batch(a) => cmd::batch::run(a),
    };
    match result {
        Ok(code) => code,
        Err(error) => failure::report(&error, json),
    }
}
