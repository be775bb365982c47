//! The flags of `baton serve`, generated from the table of variables.

use clap::{Arg, ArgMatches, Command, FromArgMatches};

use crate::config::{self, Preset};

/// The flags that were given, by the name of their variable.
#[derive(Clone, Debug, Default)]
pub struct Given(pub config::Flags);

impl clap::Args for Given {
    fn augment_args(command: Command) -> Command {
        config::SECTIONS.iter().fold(command, |command, section| {
            let flags = section.variables.iter().filter_map(|variable| Some((variable, variable.flag()?)));
            command.next_help_heading(section.title).args(flags.map(|(variable, flag)| {
                let default = match variable.preset {
                    Preset::Unset => String::new(),
                    Preset::Found(how) => format!(" [default: {how}]"),
                    Preset::Is(_) | Preset::Time(_) => {
                        format!(" [default: {}]", variable.preset.value().unwrap_or_default())
                    }
                };
                let warning =
                    if variable.kind.is_secret() { "; other users of this machine can see flags" } else { "" };
                Arg::new(variable.name)
                    .long(flag)
                    .value_name("VALUE")
                    .help(format!("{}{warning} [env: {}]{default}", variable.meaning, variable.name))
                    .long_help(format!(
                        "{}: {}{warning} [env: {}]{default}",
                        variable.meaning,
                        variable.kind.expects(),
                        variable.name
                    ))
            }))
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Given {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut given = Self::default();
        given.update_from_arg_matches(matches)?;
        Ok(given)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for variable in config::all().filter(|variable| variable.flag().is_some()) {
            if let Some(value) = matches.get_one::<String>(variable.name) {
                self.0.insert(variable.name, value.clone());
            }
        }
        Ok(())
    }
}

/// The flags of `baton serve` for a verb that only uses its storage: accepted, and left out of the help.
#[derive(Clone, Debug, Default)]
pub struct HiddenFlags(pub Given);

impl clap::Args for HiddenFlags {
    fn augment_args(command: Command) -> Command {
        let own: Vec<_> = command.get_arguments().map(|argument| argument.get_id().clone()).collect();
        let is_flag = |id: &clap::Id| !own.contains(id);
        Given::augment_args(command)
            .mut_args(|argument| if is_flag(argument.get_id()) { argument.hide(true) } else { argument })
            .next_help_heading(None)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for HiddenFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Given::from_arg_matches(matches).map(Self)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0.update_from_arg_matches(matches)
    }
}
