//! `transfer`: the cost of copies between host and device, by every method.

mod copies;
mod meter;
mod model;
mod overlap;
mod published;
mod small;

use crate::cli::{Part, TransferArgs};
use crate::exit::{Failure, Outcome};
use crate::session::Session;
use meter::Meter;

/// Runs the command.
///
/// # Errors
/// When the device cannot be opened or fails, lacks memory for the smallest copies, or standard
/// output cannot be written.
pub fn run(session: &Session, args: &TransferArgs) -> Result<Outcome, Failure> {
    let meter = Meter::new(session, args)?;
    if args.measures(Part::Copies) {
        copies::run(session, &meter)?;
    }
    if args.measures(Part::Small) {
        small::run(session, &meter)?;
    }
    if args.measures(Part::Overlap) {
        overlap::run(session, &meter)?;
    }
    if args.measures(Part::Nvbandwidth) {
        published::bandwidth(session, &meter)?;
    }
    if args.measures(Part::SwapBlocks) {
        published::swap_blocks(session, &meter)?;
    }
    if args.measures(Part::Model) {
        model::run(session, &meter)?;
    }
    Ok(match meter.violations(session) {
        0 => Outcome::Done,
        _ => Outcome::Violations,
    })
}
