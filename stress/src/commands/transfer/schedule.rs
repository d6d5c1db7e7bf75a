//! The staging ring in virtual time.

use aquifer_transfer::{Direction, VirtualSchedule};
use serde::Serialize;

use super::meter::VIRTUAL;
use crate::commands::hundredths;
use crate::exit::Failure;
use crate::session::Session;
use crate::table::table;
use crate::text::Bytes;

/// Speeds of links that are modelled, in GB/s: PCIe 4.0 and 5.0 with 16 lanes, as they are used.
const LINKS: [u64; 2] = [25, 55];

/// A row of results. `transfer --help` explains the fields.
#[derive(Debug, Clone, Serialize)]
struct Row {
    part: &'static str,
    device: &'static str,
    modelled: bool,
    clock: &'static str,
    direction: &'static str,
    bytes: u64,
    link_gb_s: u64,
    copy_gb_s: u64,
    call_us: f64,
    chunk_bytes: u64,
    chunks: u64,
    workers: u64,
    gb_per_s: f64,
    idle_share: f64,
    stalls: u64,
    intact: bool,
}

/// A schedule of four times the largest copy, but no more than it has by itself, which is enough for a steady state.
fn schedule(direction: Direction, link: u64, max_mb: u64) -> VirtualSchedule {
    let usual = VirtualSchedule::new(direction, link);
    let bytes = usual.bytes.min(max_mb.saturating_mul(4 << 20));
    usual.bytes(bytes)
}

/// Tells whether every byte arrived.
#[expect(clippy::cast_precision_loss, reason = "times for people")]
pub(super) fn run(session: &Session, max_mb: u64) -> Result<bool, Failure> {
    let headings = ["staged", "link, GB/s", "chunks", "threads", "GB/s", "link idle", "late"];
    let mut table = table(&headings, 1);
    let mut intact = true;
    for (direction, name) in [(Direction::Upload, "upload"), (Direction::Download, "download")] {
        for link in LINKS {
            let schedule = schedule(direction, link, max_mb);
            let report = schedule.run()?;
            let row = Row {
                part: "schedule",
                device: "sim",
                modelled: true,
                clock: VIRTUAL,
                direction: name,
                bytes: report.bytes,
                link_gb_s: link,
                copy_gb_s: schedule.copy_gb_s,
                call_us: hundredths(schedule.call.as_nanos() as f64 / 1e3),
                chunk_bytes: report.chunk_bytes,
                chunks: report.chunks,
                workers: report.workers,
                gb_per_s: hundredths(link as f64 * (1.0 - report.idle_share)),
                idle_share: (report.idle_share * 1e4).round() / 1e4,
                stalls: report.stalls,
                intact: report.intact,
            };
            intact &= report.intact;
            session.row(&row)?;
            table.add_row([
                name.to_owned(),
                link.to_string(),
                format!("{} × {}", row.chunks, Bytes(row.chunk_bytes)),
                row.workers.to_string(),
                format!("{:.2}", row.gb_per_s),
                format!("{:.1} %", 100.0 * report.idle_share),
                row.stalls.to_string(),
            ]);
        }
    }
    session.show(table)?;
    Ok(intact)
}
