//! How a subcommand is told about its cluster.

use std::path::PathBuf;

use slipstream_base::cluster::{
    Cluster, EngineConfig, PoolConfig, PoolRole, RouterPolicy, TimingConfig,
};

/// Cluster file and overrides.
#[derive(clap::Args)]
pub(crate) struct ClusterArgs {
    /// Cluster file (TOML); without one, the defaults
    #[arg(value_name = "CLUSTER.TOML")]
    cluster: Option<PathBuf>,
    /// Override a key of the cluster file; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Print the effective configuration, with where each value came from, and exit
    #[arg(long)]
    print_config: bool,
}

impl ClusterArgs {
    /// Resolves the cluster.
    pub(crate) fn resolve(&self, sets: &[String]) -> anyhow::Result<Option<Cluster>> {
        let mut cluster = Cluster {
            pools: vec![PoolConfig {
                name: "main".into(),
                role: PoolRole::default(),
                workers: 8,
                engine: EngineConfig {
                    timing: TimingConfig::Constant {
                        step_ns: 10_000_000,
                    },
                    ..Default::default()
                },
            }],
            ..Default::default()
        };
        for set in sets.iter().chain(&self.set) {
            let (k, v) = set.split_once('=').unwrap_or_default();
            match k {
                "live.listen" => cluster.live.listen = v.trim_matches('"').into(),
                "live.speedup" => cluster.live.speedup = v.parse()?,
                "live.shards" => cluster.live.shards = v.parse()?,
                "live.engine_threads" => cluster.live.engine_threads = v.parse()?,
                "workers" => cluster.pools[0].workers = v.parse()?,
                "rr" => cluster.router.policy = RouterPolicy::RoundRobin,
                _ => anyhow::bail!("{k}"),
            }
        }
        Ok(Some(cluster))
    }
}
