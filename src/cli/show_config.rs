//! `baton config`: every setting, its value and where it comes from. Secrets are redacted.

use std::process::ExitCode;

use serde_json::{Value, json};

use super::{
    flags,
    global_options::{OutputFormat, OutputOption},
    screen,
};
use crate::{
    config::{self, Config, Setting},
    runtime,
};

/// Print every setting, its value and its source
///
/// Accepts the options of `baton serve`: `baton config --listen …` shows their effect.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  baton config\n  baton config --check\n  baton config -o json | jq '.[] | select(.source != \"default\")'"
)]
pub struct ConfigArgs {
    #[command(flatten)]
    pub output: OutputOption,
    /// Try every configured store and report what works, as text; exit 1 if something does not
    #[arg(long)]
    pub check: bool,
    #[command(flatten)]
    pub flags: flags::Given,
}

pub fn run(args: &ConfigArgs) -> anyhow::Result<ExitCode> {
    let config = Config::read(&args.flags.0, config::process_environment)?;
    if args.check {
        rustls::crypto::ring::default_provider().install_default().ok();
        let (text, well) = tokio::runtime::Runtime::new()?.block_on(super::check::check(&config));
        let (line, holds) = super::check::limits(&config, runtime::probe_cgroups());
        let warnings: String = config.warnings().iter().map(|warning| format!("{warning}\n")).collect();
        // The result of the storage check comes last.
        screen::print(&(warnings + &line + &text))?;
        return Ok(if well && holds { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    let text = match args.output.format {
        OutputFormat::Table => table(config.settings()),
        OutputFormat::Json => screen::json(&json(config.settings())),
        OutputFormat::Name => config.settings().iter().map(|setting| format!("{}\n", setting.name)).collect(),
    };
    screen::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn table(settings: &[Setting]) -> String {
    let shown = |setting: &Setting| setting.value.clone().unwrap_or_else(|| "-".to_owned());
    let names = settings.iter().map(|setting| setting.name.len()).max().unwrap_or(0);
    let values = settings.iter().map(|setting| shown(setting).len()).max().unwrap_or(0).min(48);
    settings
        .iter()
        .map(|setting| format!("{:names$}  {:values$}  {}\n", setting.name, shown(setting), setting.source))
        .collect()
}

fn json(settings: &[Setting]) -> Value {
    settings
        .iter()
        .map(|setting| {
            let variable = config::find(setting.name);
            json!({
                "name": setting.name,
                "flag": variable.and_then(config::Variable::flag).map(|flag| format!("--{flag}")),
                "value": setting.value,
                "source": setting.source,
                "meaning": variable.map(|variable| variable.meaning),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Vec<Setting> {
        let env = |name: &str| match name {
            "BATON_ADMIN_KEY" => Some("hunter2".to_owned()),
            "BATON_DRAIN" => Some("3s".to_owned()),
            _ => None,
        };
        Config::from_env(env).unwrap().settings().to_vec()
    }

    #[test]
    fn the_table_has_a_line_per_variable_with_value_and_source() {
        let text = table(&settings());
        assert_eq!(text.lines().count(), config::all().count());
        let words =
            |name| text.lines().find(|line| line.starts_with(name)).unwrap().split_whitespace().collect::<Vec<_>>();
        assert_eq!(words("BATON_DRAIN "), ["BATON_DRAIN", "3s", "variable"]);
        assert_eq!(words("BATON_RETENTION"), ["BATON_RETENTION", "off", "default"]);
        assert_eq!(words("SANDBOX_LOCK_BUCKET"), ["SANDBOX_LOCK_BUCKET", "-", "default"]);
    }

    #[test]
    fn no_secret_is_in_either_output() {
        assert!(!table(&settings()).contains("hunter2"));
        let json = json(&settings());
        assert!(!json.to_string().contains("hunter2"));
        let key = json.as_array().unwrap().iter().find(|setting| setting["name"] == "BATON_ADMIN_KEY").unwrap();
        assert_eq!((&key["value"], &key["source"]), (&json!("(redacted)"), &json!("variable")));
    }
}
