//! A copy that does not wait into memory that is only borrowed. `download_blocking` waits.

use aquifer_allocator::Buffer;
use aquifer_transfer::{Pending, Transfer, TransferError};

fn wrong(transfer: &Transfer, from: &Buffer<f32>, values: &mut [f32]) -> Result<Pending<()>, TransferError> {
    transfer.download(from, values)
}

fn main() {}
