//! `oom`: runs out of memory in several ways, shows the reports, and recovers.

use std::path::Path;

use serde::Serialize;

use crate::cli::OomArgs;
use crate::commands::{list, save, violations};
use crate::exit::{Failure, Outcome};
use crate::session::Session;
use crate::table::{Column, in_terminal, table};
use crate::text::Bytes;
use crate::ways::{self, Stand, Way};

/// A row of results. `oom --help` explains the fields.
#[derive(Debug, Clone, Serialize)]
#[expect(missing_docs, reason = "the help text explains them")]
#[non_exhaustive]
pub struct Row {
    pub way: &'static str,
    pub device: String,
    pub requested_bytes: u64,
    pub refused: bool,
    pub error: Option<String>,
    pub advice: Vec<String>,
    pub recovered_by: String,
    pub recovered: bool,
    pub intact: bool,
    pub usable: bool,
    pub allocated_bytes_before: u64,
    pub allocated_bytes_after: u64,
    pub reserved_bytes_before: u64,
    pub reserved_bytes_after: u64,
    pub violations: u64,
}

/// A way that was skipped.
#[derive(Debug, Clone, Serialize)]
struct Skipped {
    way: &'static str,
    device: String,
    skipped: &'static str,
}

/// A way that failed.
#[derive(Debug, Clone, Serialize)]
struct Broken {
    way: &'static str,
    device: String,
    failed: String,
}

/// Runs the command.
///
/// # Errors
/// When there is no such way, several configs are given, a snapshot is to be saved of several ways,
/// the device cannot be opened or is too small, or standard output cannot be written.
pub fn run(session: &Session, args: &OomArgs) -> Result<Outcome, Failure> {
    if args.list {
        let all = ways::ALL.map(|Way { name, summary, .. }| (name, summary));
        return list(session, 14, all, |way, summary| Listed { way, summary });
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
            session.row(&Skipped { way: way.name, device: session.device_text().to_owned(), skipped })?;
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
                session.row(&Broken { way: way.name, device: session.device_text().to_owned(), failed })?;
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
        session.show(table(&rows, 4, &COLUMNS))?;
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

/// A row of `--list`.
#[derive(Serialize)]
struct Listed {
    way: &'static str,
    summary: &'static str,
}

fn go(session: &Session, way: &Way, out: Option<&Path>) -> Result<Row, Failure> {
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
    let row = Row {
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

const COLUMNS: [Column<Row>; 6] = [
    ("way", |row| row.way.to_owned()),
    ("asked for", |row| Bytes(row.requested_bytes).to_string()),
    ("answer", |row| word(row.refused, "refused", "served").to_owned()),
    ("recovered by", |row| word(row.recovered, &row.recovered_by, "NOT recovered").to_owned()),
    ("written before", |row| word(row.intact, "intact", "DAMAGED").to_owned()),
    ("afterwards", |row| word(row.usable, "usable", "NOT usable").to_owned()),
];

fn word<'a>(good: bool, yes: &'a str, no: &'a str) -> &'a str {
    if good { yes } else { no }
}

impl Row {
    fn outcome(&self) -> Outcome {
        match self {
            Row { violations: 1.., .. } => Outcome::Violations,
            Row { recovered: true, intact: true, usable: true, .. } => Outcome::Done,
            _ => Outcome::Failed,
        }
    }
}
