//! Flags of the axes that `plan` searches, one for each entry of the planner's list.

use clap::builder::{PossibleValue, PossibleValuesParser, ValueParser};
use clap::{Arg, ArgAction, ArgMatches, Command};
use slipstream_study::plan::{AXES, Axes, Axis, Domain};

/// Values of the axes.
#[derive(Clone)]
pub(crate) struct AxisArgs(pub(crate) Axes);

fn parser(axis: &'static Axis) -> ValueParser {
    let named = |names: &[(&'static str, &'static str)]| {
        let values = names
            .iter()
            .map(|&(name, meaning)| PossibleValue::new(name).help(meaning));
        PossibleValuesParser::new(values).into()
    };
    match axis.domain {
        Domain::Names(names) => named(names),
        Domain::Switches([off, on]) => named(&[("off", off), ("on", on)]),
        _ => ValueParser::from(move |text: &str| {
            let text = text.trim();
            axis.check_text(text).map(|()| text.to_owned())
        }),
    }
}

fn flag(axis: &'static Axis) -> Arg {
    let arg = Arg::new(axis.name)
        // A flag lives as long as the program.
        .long(&*axis.flag().leak())
        .help(axis.help)
        .help_heading("Search")
        .value_name(axis.value_name)
        .value_delimiter(',')
        .value_parser(parser(axis))
        .action(ArgAction::Append);
    if axis.default.is_empty() {
        arg
    } else {
        arg.default_value(axis.default)
    }
}

impl clap::Args for AxisArgs {
    fn augment_args(command: Command) -> Command {
        AXES.iter()
            .fold(command, |command, axis| command.arg(flag(axis)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        AxisArgs::augment_args(command)
    }
}

impl clap::FromArgMatches for AxisArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<AxisArgs, clap::Error> {
        let mut args = AxisArgs(Axes::default());
        args.update_from_arg_matches(matches)?;
        Ok(args)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for axis in AXES {
            let Some(texts) = matches.get_many::<String>(axis.name) else {
                continue;
            };
            let texts: Vec<String> = texts.cloned().collect();
            self.0.set(axis, &texts).map_err(|message| {
                clap::Error::raw(clap::error::ErrorKind::ValueValidation, message)
            })?;
        }
        Ok(())
    }
}
