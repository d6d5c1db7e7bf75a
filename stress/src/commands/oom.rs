//! `oom`: runs out of memory in several ways, shows the reports, and recovers.

use std::path::Path;

use serde_json::json;

use crate::cli::OomArgs;
use crate::commands::{list, save, violations};
use crate::exit::{Failure, Outcome};
use crate::row::{Row, row};
use crate::session::Session;
use crate::table::{bytes, in_terminal};
use crate::text::Bytes;
use crate::ways::{self, Stand, Way};

/// Runs the command.
///
/// # Errors
/// When there is no such way, several configs are given, a snapshot is to be saved of several ways,
/// the device cannot be opened or is too small, or standard output cannot be written.
pub fn run(session: &Session, args: &OomArgs) -> Result<Outcome, Failure> {
    if args.list {
        let all = ways::ALL.map(|Way { name, summary, .. }| (name, summary));
        return list(session, 14, "way", all);
    }
    session.config()?;
    let ways = if args.ways.is_empty() { &ways::ALL[..] } else { &args.ways };
    if args.snapshot.is_some() && ways.len() > 1 {
        return Err(Failure::Usage(format!("--snapshot takes one --way, not {}", ways.len())));
    }
    let mut outcome = Outcome::Done;
    let mut rows = Vec::new();
    for way in ways {
        session.show(in_terminal(&format!("{}: {}", way.name, way.summary)))?;
        let simulated = session.sim().is_some();
        if let Some(skipped) = way.needs_simulator.filter(|_| !simulated) {
            session.row(&json!({"way": way.name, "device": session.device_text(), "skipped": skipped}))?;
            session.show(format_args!("  skipped: {skipped}\n"))?;
            continue;
        }
        let row = match go(session, way, args.snapshot.as_deref()) {
            Ok(row) => row,
            Err(failure) if concerns_all(&failure) => return Err(failure),
            Err(failure) => {
                let failed = failure.to_string();
                session.message(format_args!("error: {}: {failed}", way.name));
                session.show(format_args!("  FAILED: {failed}\n"))?;
                session.row(&json!({"way": way.name, "device": session.device_text(), "failed": failed}))?;
                outcome = outcome.max(Outcome::Failed);
                continue;
            }
        };
        session.row(&row)?;
        outcome = outcome.max(row.outcome());
        if row.outcome() != Outcome::Done {
            session.message(format_args!("error: {} did not go as it should", row.way));
        }
        rows.push(row);
    }
    if !rows.is_empty() {
        session.show(Recovered::table(&rows))?;
    }
    Ok(outcome)
}

/// Whether all other ways would fail, too.
fn concerns_all(failure: &Failure) -> bool {
    matches!(
        failure,
        Failure::Usage(_) | Failure::Open(_) | Failure::OutOfMemory(_) | Failure::Output(_) | Failure::OutputClosed
    )
}

row! {
    /// Each way sets memory up, writes patterns to it, asks for more than it can get, and then follows
    /// the report's advice. After that the patterns are read back, and the allocator must be as usable
    /// as before. The exit code is 1 if a way failed or did not recover; the remaining ways still run. On
    /// a real device 1/64 of the free memory, at least 256 MiB, is left untouched, because not all of it
    /// can be allocated. With --list, a row has the name of a way, and its summary.
    ///
    /// JSON keys, per way. One that did not run has only the first two, and why: skipped, or failed,
    /// which is a failure other than the expected refusal, or the reason that nothing was refused
    pub(crate) struct Recovered {
        /// the way
        way: &'static str => ["way"],
        /// the device
        device: String,
        /// size of the request
        requested_bytes: u64 => ["asked for", bytes],
        /// whether the request was refused
        refused: bool => ["answer", |row| word(row.refused, "refused", "served")],
        /// the first line of the error
        error: Option<String>,
        /// the advice in the error
        advice: Vec<String>,
        /// the measure that was taken
        recovered_by: String,
        /// whether the request, or another of its size, was served after that
        recovered: bool => ["recovered by", |row| word(row.recovered, &row.recovered_by, "NOT recovered")],
        /// whether everything written before reads back as it was written
        intact: bool => ["written before", |row| word(row.intact, "intact", "DAMAGED")],
        /// whether the allocator gives everything back in the end, and serves the same requests again
        usable: bool => ["afterwards", |row| word(row.usable, "usable", "NOT usable")],
        /// allocated before the request
        allocated_bytes_before: u64,
        /// and after the refusal, before any measure
        allocated_bytes_after: u64,
        /// held from the device before the request
        reserved_bytes_before: u64,
        /// and after the refusal
        reserved_bytes_after: u64,
        /// pieces of work that the simulated device found unordered
        violations: u64,
    }
}

fn go(session: &Session, way: &Way, out: Option<&Path>) -> Result<Recovered, Failure> {
    let mut stand = Stand::new(session, way.options)?;
    if out.is_some() {
        stand.take_snapshots();
    }
    if !stand.options.is_empty() {
        session.show(format_args!("  with {}", stand.options))?;
    }
    let story = way.go(&mut stand)?;
    if let (Some(snapshot), Some(path)) = (&story.refusal.snapshot, out) {
        save(session, snapshot, path)?;
    }
    let (intact, blocks) = (stand.is_intact()?, stand.blocks());
    let report = &story.refusal.report;
    let requested = Bytes(story.refusal.requested);
    match report {
        Some(report) => session.show(format_args!("\n{}\n", in_terminal(&report.to_string())))?,
        None => session.show(format_args!("\n{requested} were asked for, and served.\n"))?,
    }
    let row = Recovered {
        way: way.name,
        device: session.device_text().to_owned(),
        requested_bytes: story.refusal.requested,
        refused: report.is_some(),
        error: report.as_ref().map(|report| report.to_string().lines().next().unwrap_or_default().to_owned()),
        advice: report.iter().flat_map(|report| &report.advice).map(ToString::to_string).collect(),
        recovered_by: story.recovered_by,
        recovered: story.recovered,
        intact,
        usable: stand.is_usable()?,
        allocated_bytes_before: story.refusal.before.0,
        allocated_bytes_after: story.refusal.after.0,
        reserved_bytes_before: story.refusal.before.1,
        reserved_bytes_after: story.refusal.after.1,
        violations: violations(session, way.name, stand.allocator.device()),
    };
    session.show(in_terminal(&format!(
        "  {} by {}\n  {} written before {}\n  everything was freed, and the allocator {}\n\n",
        word(row.recovered, "recovered", "NOT recovered"),
        row.recovered_by,
        if blocks == 1 { "the block".to_owned() } else { format!("the {blocks} blocks") },
        match (row.intact, blocks) {
            (true, 1) => "reads as it was written",
            (true, _) => "read as they were written",
            (false, 1) => "was DAMAGED",
            (false, _) => "were DAMAGED",
        },
        word(row.usable, "serves as before", "does NOT serve as before"),
    )))?;
    Ok(row)
}

fn word<'a>(good: bool, yes: &'a str, no: &'a str) -> &'a str {
    if good { yes } else { no }
}

impl Recovered {
    fn outcome(&self) -> Outcome {
        match self {
            Recovered { violations: 1.., .. } => Outcome::Violations,
            Recovered { recovered: true, intact: true, usable: true, .. } => Outcome::Done,
            _ => Outcome::Failed,
        }
    }
}
