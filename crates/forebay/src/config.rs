//! Where options come from: the command line, then `FOREBAY_*` variables, then `forebay.toml`, then
//! defaults.
//!
//! `forebay.toml` is looked for in the current folder and in `$XDG_CONFIG_HOME/forebay` (or
//! `~/.config/forebay`); `FOREBAY_CONFIG` names another. A key is an option's long name.

use crate::term::note;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};

use crate::args::Cli;
use crate::failure;
use crate::partners::{self, Given};

/// Parses the command line over the configuration file. The error is the exit code to end with; what
/// had to be said has been said.
pub fn parse() -> Result<Cli, ExitCode> {
    let settings = match load() {
        Ok(settings) => settings,
        Err(text) => {
            note!("forebay: {text}");
            return Err(ExitCode::from(2));
        }
    };
    let mut command = Cli::command();
    let mut unknown: Vec<String> = settings.keys().cloned().collect();
    command = with_defaults(command, &settings, &mut unknown);
    if let Some(key) = unknown.first() {
        note!("forebay: forebay.toml has the key {key:?}, which no option has");
        return Err(ExitCode::from(2));
    }
    let matches = command.try_get_matches().map_err(end)?;
    let given = Given::of(&matches);
    let cli = Cli::from_arg_matches(&matches).map_err(end)?;
    match partners::check(&cli, &given) {
        Ok(()) => Ok(cli),
        Err(error) => Err(failure::report(&error, cli.json())),
    }
}

fn end(e: clap::Error) -> ExitCode {
    let _ = e.print();
    ExitCode::from(e.exit_code() as u8)
}

/// Makes the settings defaults of the options of that name, in every subcommand.
fn with_defaults(
    mut command: clap::Command,
    settings: &BTreeMap<String, String>,
    unknown: &mut Vec<String>,
) -> clap::Command {
    let ids: Vec<(clap::Id, String)> = command
        .get_arguments()
        .filter_map(|a| Some((a.get_id().clone(), a.get_long()?.to_string())))
        .collect();
    for (id, long) in ids {
        if let Some(value) = settings.get(&long) {
            unknown.retain(|k| *k != long);
            let value: &'static str = Box::leak(value.clone().into_boxed_str());
            command = command.mut_arg(id, |a| a.default_value(value));
        }
    }
    let names: Vec<String> = command.get_subcommands().map(|c| c.get_name().to_string()).collect();
    for name in names {
        command = command.mut_subcommand(name, |c| with_defaults(c, settings, unknown));
    }
    command
}

fn load() -> Result<BTreeMap<String, String>, String> {
    let Some(path) = find() else { return Ok(BTreeMap::new()) };
    let shown = path.display();
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{shown}: {e}"))?;
    let table: toml::Table =
        text.parse().map_err(|e: toml::de::Error| format!("{shown}: {}", e.message()))?;
    table
        .into_iter()
        .map(|(key, value)| match value {
            toml::Value::String(s) => Ok((key, s)),
            toml::Value::Integer(_) | toml::Value::Float(_) | toml::Value::Boolean(_) => {
                Ok((key, value.to_string()))
            }
            _ => Err(format!("{shown}: {key} must be a string, a number or a boolean")),
        })
        .collect()
}

fn find() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("FOREBAY_CONFIG") {
        return Some(path.into());
    }
    let home = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".config")));
    let candidates =
        [Some(PathBuf::from("forebay.toml")), home.map(|h| h.join("forebay/forebay.toml"))];
    candidates.into_iter().flatten().find(|p| p.is_file())
}
