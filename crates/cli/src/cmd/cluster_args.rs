//! Flags for the cluster file and its overrides.

use std::path::PathBuf;

use slipstream_config::cluster::Cluster;
use slipstream_config::doc::Settings;
use slipstream_fleet::live::{refuse_simulated, simulation_only};
use slipstream_fleet::reload::{ClusterFile, ReadFile};
use slipstream_study::source::ClusterSource;

use crate::out;

/// Cluster file and overrides. Precedence: flag, environment, file, default.
#[derive(Clone, clap::Args)]
pub(crate) struct ClusterArgs {
    /// Cluster file (docs/cluster-file.md); without one, the defaults
    #[arg(value_name = "CLUSTER.TOML")]
    cluster: Option<PathBuf>,
    /// Override a key of the cluster file, such as engine.max_num_seqs=64; may be repeated; the last value of a key wins
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Print the effective configuration with the origin of each value, and exit
    #[arg(long)]
    print_config: bool,
}

impl ClusterArgs {
    /// The flags again, for another subcommand that accepts them.
    pub(crate) fn flags(&self) -> Vec<std::ffi::OsString> {
        let file = self
            .cluster
            .iter()
            .map(|path| path.clone().into_os_string());
        let sets = self.set.iter().map(|set| format!("--set={set}").into());
        file.chain(sets).collect()
    }

    /// The cluster file, if there is one.
    pub(crate) fn file(&self) -> Option<&PathBuf> {
        self.cluster.as_ref()
    }

    /// The file and its overrides, for a question.
    pub(crate) fn source(&self) -> ClusterSource {
        ClusterSource {
            file: self.cluster.clone(),
            text: None,
            sets: self.set.clone(),
        }
    }

    /// As [`resolve_live`](Self::resolve_live), and the file for a server that watches it. The file is read once: what the
    /// watcher takes as served is what the cluster was made from.
    pub(crate) fn resolve_watched(
        &self,
        sets: &[String],
    ) -> anyhow::Result<Option<(Cluster, Option<ClusterFile>)>> {
        let mut source = self.source();
        let content = source.content()?;
        let text = match (content.map(String::from_utf8), &self.cluster) {
            (Some(Err(error)), Some(path)) if !path.is_file() => {
                anyhow::bail!("{}: {}", path.display(), error.utf8_error());
            }
            // If it is not text, the reader of the file, which reads it again, says where.
            (text, _) => text.and_then(Result::ok),
        };
        let text = text.map(|text| text.trim_start_matches('\u{feff}').to_owned());
        source.text.clone_from(&text);
        let Some((cluster, settings)) = self.resolve_from(&source, sets)? else {
            return Ok(None);
        };
        out::model_lines(&cluster.model_lines());
        check_live(&cluster)?;
        let sets = sets.to_vec();
        let resolve = move |text: String, read: ReadFile<'_>| {
            let text = Some(text);
            let source = ClusterSource {
                text,
                ..source.clone()
            };
            source.resolve_by(&sets, read)
        };
        let file = self
            .cluster
            .clone()
            .zip(text)
            .map(|(path, text)| ClusterFile {
                path,
                text,
                settings,
                resolve: Box::new(resolve),
            });
        Ok(Some((cluster, file)))
    }

    /// Whether the configuration is to be printed instead.
    pub(crate) fn is_printed(&self) -> bool {
        self.print_config
    }

    /// Prints the configuration, if that was asked for instead.
    pub(crate) fn prints_config(&self) -> anyhow::Result<bool> {
        Ok(self.print_config && self.resolve(&[])?.is_none())
    }

    /// The cluster, with `sets` (from a subcommand's own flags) as the last overrides. `None` if
    /// its configuration was printed instead. Describes its models on stderr.
    pub(crate) fn resolve(&self, sets: &[String]) -> anyhow::Result<Option<Cluster>> {
        let resolved = self.resolve_with_settings(sets)?;
        if let Some((cluster, _)) = &resolved {
            out::model_lines(&cluster.model_lines());
        }
        Ok(resolved.map(|(cluster, _)| cluster))
    }

    /// [`resolve`](Self::resolve), also with the origin of each value.
    pub(crate) fn resolve_with_settings(
        &self,
        sets: &[String],
    ) -> anyhow::Result<Option<(Cluster, Settings)>> {
        self.resolve_from(&self.source(), sets)
    }

    fn resolve_from(
        &self,
        source: &ClusterSource,
        sets: &[String],
    ) -> anyhow::Result<Option<(Cluster, Settings)>> {
        // Paths in the file are relative to it, so that a folder of configuration can be moved.
        let (cluster, settings) = source.resolve(sets)?;
        if self.print_config {
            out::print(&settings.to_toml())?;
            return Ok(None);
        }
        Ok(Some((cluster, settings)))
    }

    /// As [`resolve`](Self::resolve), with `text` in place of a file that is not named.
    pub(crate) fn resolve_over(&self, text: String) -> anyhow::Result<Option<Cluster>> {
        let mut source = self.source();
        if source.file.is_none() {
            source.text = Some(text);
        }
        let (cluster, settings) = source.resolve(&[])?;
        if self.print_config {
            out::print(&settings.to_toml())?;
            return Ok(None);
        }
        out::model_lines(&cluster.model_lines());
        Ok(Some(cluster))
    }

    /// The first of these arguments that was given.
    pub(crate) fn first_given(&self) -> Option<&'static str> {
        let given = [
            ("CLUSTER.TOML", self.cluster.is_some()),
            ("--set", !self.set.is_empty()),
            ("--print-config", self.print_config),
        ];
        given
            .into_iter()
            .find_map(|(name, given)| given.then_some(name))
    }

    /// As [`resolve`](Self::resolve), for a cluster that is to run live.
    ///
    /// # Errors
    /// Also if the file asks for what a live cluster cannot do.
    pub(crate) fn resolve_live(&self, sets: &[String]) -> anyhow::Result<Option<Cluster>> {
        let cluster = self.resolve(sets)?;
        cluster.iter().try_for_each(check_live)?;
        Ok(cluster)
    }

    /// As [`resolve_live`](Self::resolve_live), for a command that runs modelled engines itself.
    ///
    /// # Errors
    /// Also if a pool has real engines.
    pub(crate) fn resolve_modelled(&self, sets: &[String]) -> anyhow::Result<Option<Cluster>> {
        let cluster = self.resolve_live(sets)?;
        let real = cluster.iter().flat_map(|cluster| &cluster.pools);
        if let Some(pool) = real.into_iter().find(|pool| pool.engines.is_some()) {
            anyhow::bail!(
                "pool `{}` has real engines (`engines`), and this command runs modelled ones; \
                 `slipstream serve` forwards to real ones",
                pool.name
            );
        }
        let mut pools = cluster.iter().flat_map(|cluster| &cluster.pools);
        if pools.any(|pool| pool.autoscale.is_some()) {
            errln!(
                "note: `autoscale.policy` has an effect in simulation and in `slipstream serve` only: all workers run"
            );
        }
        Ok(cluster)
    }
}

/// Refuses settings that a live cluster cannot follow, and names those that it does not need.
fn check_live(cluster: &Cluster) -> anyhow::Result<()> {
    refuse_simulated(cluster)?;
    for setting in simulation_only(cluster) {
        errln!("note: {setting} has an effect in simulation only");
    }
    Ok(())
}
