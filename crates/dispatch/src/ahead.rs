//! Decisions ahead of time, for a driver that knows where requests run before any of them has.

use slipstream_base::SimTime;
use slipstream_router::{Chosen, RouteError, RouteRequest, Router};

/// Chooses where a request runs, and charges nothing: the driver does once that time has come.
///
/// # Errors
/// [`RouteError`].
pub fn choose(
    router: &mut Router,
    now: SimTime,
    request: &RouteRequest<'_>,
) -> Result<Chosen, RouteError> {
    router.choose(now, request, None)
}
