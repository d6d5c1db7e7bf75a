//! `bench`: how fast allocation and free are.
use crate::{
    cli::BenchArgs,
    exit::{Failure, Outcome},
    session::Session,
};
/// Runs the command.
///
/// # Errors
/// None yet.
pub fn run(_: &Session, _: &BenchArgs) -> Result<Outcome, Failure> {
    Ok(Outcome::Done)
}
