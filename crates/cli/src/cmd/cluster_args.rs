//! How a subcommand is told about its cluster.

use std::path::PathBuf;

use anyhow::Context;
use slipstream_config::cluster::{Cluster, HostMode, file};
use slipstream_config::doc::{Doc, Settings};

use crate::out;

/// Cluster file and overrides. Flag over environment over file over default.
#[derive(clap::Args)]
pub(crate) struct ClusterArgs {
    /// Cluster file (docs/cluster-file.md); without one, the defaults
    #[arg(value_name = "CLUSTER.TOML")]
    cluster: Option<PathBuf>,
    /// Override a key of the cluster file, such as engine.max_num_seqs=64; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Print the effective configuration, with where each value came from, and exit
    #[arg(long)]
    print_config: bool,
}

impl ClusterArgs {
    /// The flags again, for another subcommand that takes them.
    pub(crate) fn flags(&self) -> Vec<std::ffi::OsString> {
        let file = self
            .cluster
            .iter()
            .map(|path| path.clone().into_os_string());
        let sets = self.set.iter().map(|set| format!("--set={set}").into());
        file.chain(sets).collect()
    }

    /// What the cluster comes from, in words: the file and what was laid over it.
    pub(crate) fn name(&self) -> String {
        let file = self.cluster.as_ref().map_or_else(
            || "the defaults".to_owned(),
            |path| path.display().to_string(),
        );
        let sets = self.set.iter().map(String::as_str);
        [file.as_str()]
            .into_iter()
            .chain(sets)
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// The cluster, with `sets` (made from a subcommand's own flags) laid over it last. `None` if
    /// its configuration was printed instead.
    pub(crate) fn resolve(&self, sets: &[String]) -> anyhow::Result<Option<Cluster>> {
        Ok(self
            .resolve_with_settings(sets)?
            .map(|(cluster, _)| cluster))
    }

    /// As [`resolve`](Self::resolve), with where each value came from.
    pub(crate) fn resolve_with_settings(
        &self,
        sets: &[String],
    ) -> anyhow::Result<Option<(Cluster, Settings)>> {
        let mut doc = match &self.cluster {
            None => Doc::empty(),
            Some(path) => {
                let text = super::files::read(path)
                    .with_context(|| format!("reading the cluster file {}", path.display()))?;
                Doc::parse(&path.display().to_string(), &text)
            }
        };
        // A variable of another program may hold anything; one of ours that is not UTF-8 becomes a
        // value with U+FFFD in it, which the document then refuses by name.
        let vars = std::env::vars_os().map(|(name, value)| {
            let text = |os: std::ffi::OsString| os.to_string_lossy().into_owned();
            (text(name), text(value))
        });
        doc.env(file::ENV_PREFIX, vars);
        for set in self.set.iter().chain(sets) {
            doc.set(set);
        }
        // Paths in the file are relative to it, so that a folder of configuration can be moved.
        let (cluster, settings) = file::read(doc, super::files::read)?;
        if self.print_config {
            out::print(&settings.to_toml())?;
            return Ok(None);
        }
        Ok(Some((cluster, settings)))
    }

    /// As [`resolve`](Self::resolve), for a cluster that is to run live.
    pub(crate) fn resolve_live(&self, sets: &[String]) -> anyhow::Result<Option<Cluster>> {
        let cluster = self.resolve(sets)?;
        if let Some(cluster) = &cluster {
            note_for_live(cluster);
        }
        Ok(cluster)
    }
}

/// Names on stderr the settings that only a simulation heeds.
fn note_for_live(cluster: &Cluster) {
    for setting in ignored_live(cluster) {
        eprintln!("note: {setting} has an effect in simulation only");
    }
}

/// Settings of `cluster` that a live cluster does not heed, as a file would have them.
fn ignored_live(cluster: &Cluster) -> Vec<String> {
    let mut ignored = Vec::new();
    match cluster.events.len() {
        0 => {}
        1 => ignored.push("the [[event]] of the cluster file".to_owned()),
        events => ignored.push(format!(
            "each of the {events} [[event]] of the cluster file"
        )),
    }
    let mut setting = |ignores: bool, name: &str| {
        if ignores {
            ignored.push(format!("`{name}`"));
        }
    };
    setting(cluster.router.kv_lag_ms > 0.0, "router.kv_lag_ms");
    setting(cluster.host.mode != HostMode::None, "host.mode");
    setting(cluster.network.messages, "network.messages");
    ignored
}

#[cfg(test)]
mod tests {
    use slipstream_config::doc::Doc;

    use super::*;

    #[test]
    fn settings_for_simulations_are_named() {
        let ignored = |text: &str| {
            let doc = Doc::parse("c.toml", text.as_bytes());
            let (cluster, _) = file::read(doc, |path| std::fs::read(path)).expect("a cluster file");
            ignored_live(&cluster)
        };
        assert_eq!(ignored(""), Vec::<String>::new());
        assert_eq!(
            ignored(
                "[router]\nkv_lag_ms = 2\nqueue_max = 5\n[host]\nmode = \"ideal\"\n\
                 [network]\nmode = \"flows\"\nmessages = true\n"
            ),
            ["`router.kv_lag_ms`", "`host.mode`", "`network.messages`"]
        );
    }
}
