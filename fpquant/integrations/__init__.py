"""Where other tools meet fpquant."""
