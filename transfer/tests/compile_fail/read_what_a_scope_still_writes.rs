//! Values read inside the scope that a download is still bringing.

use aquifer_allocator::DeviceBuffer;
use aquifer_transfer::{Transfer, TransferError};

fn wrong(transfer: &Transfer, device: &DeviceBuffer<f32>) -> Result<f32, TransferError> {
    let mut values = vec![0.0; 1000];
    transfer.scope(|scope| {
        scope.download(device, &mut values)?;
        Ok(values[0])
    })
}

fn main() {}
