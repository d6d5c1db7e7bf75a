//! A copy that does not wait into memory that is only borrowed. `download_blocking` waits.

use aquifer::{Buffer, Error, Pending};
use aquifer::transfer::Transfer;

fn wrong(transfer: &Transfer, from: &Buffer<f32>, values: &mut [f32]) -> Result<Pending<()>, Error> {
    transfer.download(from, values)
}

fn main() {}
