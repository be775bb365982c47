//! Reads settings from flags and variables, in the order of precedence.

use std::{borrow::Cow, path::PathBuf};

use super::{Error, Flags, Setting, SettingSource, Variable};

/// Reads variables and flags, and records every effective value.
pub(super) struct Reader<'a> {
    pub flags: &'a Flags,
    pub lookup: &'a dyn Fn(&str) -> Option<String>,
    pub settings: Vec<Setting>,
}

impl Reader<'_> {
    pub fn optional<T>(&mut self, variable: Variable, parse: impl Fn(&str) -> Option<T>) -> Result<Option<T>, Error> {
        let name = variable.name;
        let set = |text: String| Some(text.trim().to_owned()).filter(|text| !text.is_empty());
        let given = match self.flags.get(name) {
            Some(flag) => set(flag.clone()).map(|text| (text, SettingSource::Flag)),
            None => (self.lookup)(name).and_then(set).map(|text| (text, SettingSource::Variable)),
        };
        let (text, source) = match given {
            Some((text, source)) => (Some(text), source),
            None => (variable.preset.value().map(Cow::into_owned), SettingSource::Default),
        };
        let shown = text.clone().map(|text| if variable.kind.is_secret() { "(redacted)".to_owned() } else { text });
        self.settings.push(Setting { name: variable.name, value: shown.clone(), source });
        let Some(text) = text else { return Ok(None) };
        parse(&text).map(Some).ok_or_else(|| Error::Bad {
            name: match (source, variable.flag()) {
                (SettingSource::Flag, Some(flag)) => format!("--{flag}"),
                (SettingSource::Default | SettingSource::Variable | SettingSource::Flag, _) => name.to_owned(),
            },
            value: shown.unwrap_or_default(),
            expects: variable.kind.expects(),
        })
    }

    pub fn required<T>(&mut self, variable: Variable, parse: impl Fn(&str) -> Option<T>) -> Result<T, Error> {
        Ok(self.optional(variable, parse)?.expect("the table has a default for it; a test reads them all"))
    }

    /// Reads a setting whose default depends on other settings, and records the effective value.
    pub fn found<T>(
        &mut self,
        variable: Variable,
        parse: impl Fn(&str) -> Option<T>,
        default: &str,
    ) -> Result<T, Error> {
        if let Some(given) = self.optional(variable, &parse)? {
            return Ok(given);
        }
        if let Some(setting) = self.settings.last_mut() {
            setting.value = Some(default.to_owned());
        }
        Ok(parse(default).expect("a default is one of its kind; a test reads them all"))
    }

    /// The user's base directory of the given kind; records it as the effective value.
    pub fn home(&mut self, variable: &str, below_home: &str, without_home: &str) -> PathBuf {
        let set = |name: &str| (self.lookup)(name).filter(|text| text.starts_with('/')).map(PathBuf::from);
        let base = set(variable)
            .or_else(|| set("HOME").filter(|home| home.parent().is_some()).map(|home| home.join(below_home)))
            .unwrap_or_else(|| PathBuf::from(without_home));
        let path = base.join("baton");
        if let Some(setting) = self.settings.last_mut() {
            setting.value = Some(path.display().to_string());
        }
        path
    }
}
