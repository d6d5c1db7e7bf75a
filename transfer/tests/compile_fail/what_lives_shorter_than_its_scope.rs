//! Memory lent to a scope that is gone before the scope's copies are.

use aquifer_allocator::DeviceBuffer;
use aquifer_transfer::{Transfer, TransferError};

fn wrong(transfer: &Transfer, device: &mut DeviceBuffer<f32>) -> Result<(), TransferError> {
    transfer.scope(|scope| {
        let values = vec![1.0; 1000];
        scope.upload(&values, device)
    })
}

fn main() {}
