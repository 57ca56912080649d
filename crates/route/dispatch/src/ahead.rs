//! Decisions in advance, for a driver that assigns requests to ranks before any of them runs.

use slipstream_base::SimTime;
use slipstream_router::{Chosen, RouteError, RouteRequest, Router};

/// Chooses where a request runs, and charges nothing: the driver charges the rank when the request starts.
///
/// # Errors
/// [`RouteError`].
#[expect(
    clippy::disallowed_methods,
    reason = "only this crate decides (clippy.toml)"
)]
pub fn choose(
    router: &mut Router,
    now: SimTime,
    request: &RouteRequest<'_>,
) -> Result<Chosen, RouteError> {
    router.choose(now, request, None)
}
