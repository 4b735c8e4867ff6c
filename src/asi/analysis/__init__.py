"""What the paper looks at beside recall: quality scores, new documents, how docids spread, what shares them."""
