//! Runs schedules of the simulator: `vopr --seed N [--log]`, `vopr --seconds S`, `vopr --planted`.

use std::io::Write;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use slipstream_vopr::command::{Command, USAGE};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    // Each second has a million seeds of its own.
    let fresh = since.map_or(0, |since| since.as_secs() * 1_000_000);
    let command = match Command::parse(&args, fresh) {
        Ok(command) => command,
        Err(error) => {
            let _ = write!(std::io::stderr(), "error: {error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    if let Command::Seed { log: true, .. } = command {
        // Of the simulation: its events. Of the production code: what it logs.
        tracing_subscriber::fmt()
            .without_time()
            .with_max_level(tracing::Level::DEBUG)
            .with_writer(std::io::stderr)
            .init();
    }
    match command.run(&mut std::io::stdout()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) | Err(_) => ExitCode::FAILURE,
    }
}
