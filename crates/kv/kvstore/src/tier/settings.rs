//! Settings of tiers below memory, as a program in another language gives them: `TIER_SETTING` and a value.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::TierError;

/// A value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Setting {
    /// A number.
    Count(u64),
    /// A path, or other text.
    Path(PathBuf),
    /// Paths.
    Paths(Vec<PathBuf>),
}

/// The settings of one tier, by names without the tier's. Each is taken once; what is left is unknown.
#[derive(Debug)]
pub struct Settings {
    tier: &'static str,
    given: BTreeMap<String, Setting>,
}

impl Settings {
    /// Takes those of `tier` out of `all`.
    pub(super) fn of(tier: &'static str, all: &mut BTreeMap<String, Setting>) -> Settings {
        let mut given = BTreeMap::new();
        all.retain(|name, value| {
            let own = name
                .strip_prefix(tier)
                .and_then(|rest| rest.strip_prefix('_'));
            if let Some(own) = own {
                given.insert(own.to_owned(), value.clone());
            }
            own.is_none()
        });
        Settings { tier, given }
    }

    /// Takes a path; `None` if it is not given.
    ///
    /// # Errors
    /// [`TierError::Setting`], as all of these.
    pub fn path(&mut self, name: &str) -> Result<Option<PathBuf>, TierError> {
        match self.given.remove(name) {
            None => Ok(None),
            Some(Setting::Path(path)) => Ok(Some(path)),
            Some(_) => Err(self.wrong(name, "takes a path")),
        }
    }

    /// Takes paths; none if they are not given.
    ///
    /// # Errors
    /// [`TierError::Setting`].
    pub fn paths(&mut self, name: &str) -> Result<Vec<PathBuf>, TierError> {
        match self.given.remove(name) {
            None => Ok(Vec::new()),
            Some(Setting::Paths(paths)) => Ok(paths),
            Some(_) => Err(self.wrong(name, "takes a list of paths")),
        }
    }

    /// Takes a number; `default` if it is not given.
    ///
    /// # Errors
    /// [`TierError::Setting`].
    pub fn count(&mut self, name: &str, default: u64) -> Result<u64, TierError> {
        match self.given.remove(name) {
            None => Ok(default),
            Some(Setting::Count(count)) => Ok(count),
            Some(_) => Err(self.wrong(name, "takes a number of 0 or more")),
        }
    }

    /// Checks that every setting was taken.
    pub(super) fn end(mut self) -> Result<(), TierError> {
        match self.given.pop_first() {
            None => Ok(()),
            Some((name, _)) => Err(self.wrong(&name, "is unknown")),
        }
    }

    fn wrong(&self, name: &str, why: &'static str) -> TierError {
        TierError::Setting {
            name: format!("{}_{name}", self.tier),
            why,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Medium, open_lower};
    use super::*;

    fn open(given: &[(&str, Setting)]) -> Result<Vec<Medium>, String> {
        let given = given
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone()));
        let tiers = open_lower(given.collect(), None).map_err(|error| error.to_string())?;
        Ok(tiers.iter().map(|tier| tier.medium()).collect())
    }

    #[test]
    fn settings_open_the_tiers_that_they_ask_for() {
        let folder = tempfile::tempdir().unwrap();
        let dir = ("disk_dir", Setting::Path(folder.path().into()));
        let bytes = ("disk_bytes", Setting::Count(1 << 20));
        assert_eq!(open(&[]), Ok(Vec::new()));
        assert_eq!(
            open(std::slice::from_ref(&bytes)),
            Ok(Vec::new()),
            "no folder"
        );
        let others = ("disk_others", Setting::Paths(Vec::new()));
        assert_eq!(open(&[dir.clone(), bytes, others]), Ok(vec![Medium::Disk]));
        for (name, value, why) in [
            ("disk_dri", Setting::Count(1), "`disk_dri` is unknown"),
            ("diskdir", Setting::Count(1), "`diskdir` is unknown"),
            ("tape_dir", Setting::Count(1), "`tape_dir` is unknown"),
            (
                "disk_bytes",
                Setting::Path("1".into()),
                "`disk_bytes` takes a number",
            ),
            (
                "disk_others",
                Setting::Count(1),
                "`disk_others` takes a list",
            ),
        ] {
            let error = open(&[dir.clone(), (name, value)]).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        let error = open(&[("disk_dir", Setting::Count(1))]).unwrap_err();
        assert!(error.contains("`disk_dir` takes a path"), "{error}");
    }
}
