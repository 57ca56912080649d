//! `slipstream serve --shadow`: wires the twin to the fleet that it follows.

use std::path::PathBuf;

use anyhow::Context;
use slipstream_base::{SimTime, WorkerId};
use slipstream_config::cluster::{Cluster, file};
use slipstream_config::doc::Doc;
use slipstream_fleet::shadow::{
    IN_FLIGHT_MAX, LateRequest, Prediction, ShadowOptions, Twin, TwinSource,
};
use slipstream_twin::{Follower, Options, RequestRecord, Sink};
use slipstream_workload::Request;

use super::files;

/// Flags of `slipstream serve`.
#[derive(clap::Args)]
pub(super) struct ShadowArgs {
    /// Run the cluster of this file in virtual time on the requests of the real engines, and publish its latencies
    /// beside theirs (`slipstream describe` writes such a file)
    #[arg(long, value_name = "FILE")]
    shadow: Option<PathBuf>,
    /// Ratio of predicted to measured latency, in either direction, beyond which `slipstream_shadow_parted` is 1
    #[arg(long, value_name = "RATIO", default_value_t = 1.5, requires = "shadow", value_parser = ratio)]
    shadow_ratio: f64,
}

fn ratio(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok();
    let usable = number.filter(|ratio| ratio.is_finite() && *ratio > 1.0);
    usable.ok_or_else(|| format!("`{text}` is not a number above 1"))
}

impl ShadowArgs {
    /// Whether a twin is asked for.
    pub(super) fn is_on(&self) -> bool {
        self.shadow.is_some()
    }

    /// The twin, if one is asked for.
    ///
    /// # Errors
    /// The file is not valid.
    pub(super) fn options(&self) -> anyhow::Result<Option<ShadowOptions>> {
        let Some(path) = &self.shadow else {
            return Ok(None);
        };
        let name = format!("the twin's cluster file (--shadow) {}", path.display());
        let bytes = files::read(path).with_context(|| name.clone())?;
        let doc = Doc::parse(&path.display().to_string(), &bytes);
        let (cluster, _) = file::read(doc, files::read).with_context(|| name.clone())?;
        Ok(Some(ShadowOptions {
            twin: Box::new(Model {
                cluster: cluster.clone(),
                options: Options {
                    in_flight_max: IN_FLIGHT_MAX,
                    ..Options::default()
                },
            }),
            cluster,
            name,
            ratio: self.shadow_ratio,
        }))
    }
}

/// The twin's cluster.
struct Model {
    cluster: Cluster,
    options: Options,
}

impl TwinSource for Model {
    fn with(&self, run: &mut dyn FnMut(&mut dyn Twin)) -> anyhow::Result<()> {
        let follower = Follower::new(&self.cluster, &self.options, files::read)?;
        run(&mut Simulated(follower));
        Ok(())
    }
}

struct Simulated<'a>(Follower<'a>);

impl Twin for Simulated<'_> {
    fn push(&mut self, request: Request, worker: WorkerId) -> Result<(), LateRequest> {
        self.0.push(request, worker).map_err(|_| LateRequest)
    }

    fn advance(&mut self, to: SimTime, ended: &mut dyn FnMut(&Prediction)) -> Result<(), String> {
        match self.0.advance(to, &mut Ends(ended)) {
            Ok(None) => Ok(()),
            Ok(Some(cut)) => Err(cut),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Receives the requests that end.
struct Ends<'a>(&'a mut dyn FnMut(&Prediction));

impl Sink for Ends<'_> {
    fn on_request(&mut self, record: &RequestRecord<'_>) {
        (self.0)(&Prediction {
            id: record.request.session,
            is_refused: record.error.is_some(),
            due: record.request.due,
            admitted: record.admitted,
            first: record.first,
            last: record.last,
            cached_tokens: record.cached_tokens,
            output_tokens: record.output_tokens,
        });
    }
}
